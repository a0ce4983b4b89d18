"""Qwen2: llama with biased queries, keys and values, and sliding windows in the later layers of some models."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import attention, decoder, gated_mlp, read_sizes, read_windows


def qwen2(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    activation = read_activation(fields)
    windows = read_windows(fields, sizes)
    rope = read_rope(fields, sizes.head_dim)

    def layer(index: int, name: str) -> DecoderLayer:
        spec = sizes.attention(window=windows[index])
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(f"{name}.self_attn", sizes, spec, rope=rope, qkv_bias=True),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)
