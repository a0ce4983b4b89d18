"""Granite: llama with multipliers on embeddings, scores, residuals and logits."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import attention, decoder, gated_mlp, read_sizes


def granite(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    attention_bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    activation = read_activation(fields)
    spec = sizes.attention(scale=fields.number("attention_multiplier", 1.0))
    residual_multiplier = fields.number("residual_multiplier", 1.0)
    rope = read_rope(fields, sizes.head_dim)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn", sizes, spec, rope=rope, qkv_bias=attention_bias, out_bias=attention_bias
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation, biased=mlp_bias),
            residual_multiplier=residual_multiplier,
        )

    return decoder(
        fields,
        sizes,
        layer,
        RMSNorm("model.norm", sizes.embed, eps),
        max_positions=rope.max_positions,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )
