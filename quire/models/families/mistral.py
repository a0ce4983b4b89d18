"""Mistral: llama, with the same sliding window in every layer or in none."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import attention, decoder, gated_mlp, read_sizes


def mistral(fields: Fields) -> Decoder:
    if "layer_types" in fields:
        raise fields.unsupported("layer_types", "the layers of this family are alike")
    sizes = read_sizes(fields, num_key_value_heads=8)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    activation = read_activation(fields)
    window = None if fields.is_null("sliding_window") else fields.integer("sliding_window", 4096)
    rope = read_rope(fields, sizes.head_dim)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(f"{name}.self_attn", sizes, sizes.attention(window=window), rope=rope),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)
