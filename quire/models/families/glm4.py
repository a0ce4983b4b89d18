"""GLM-4: norms before and after each block, and half of each head is rotated, in pairs of neighbouring features."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import attention, decoder, fused_gated_mlp, read_sizes


def glm4(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, num_key_value_heads=2, head_dim=128)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1.5625e-7)
    biased = fields.flag("attention_bias", True)
    activation = read_activation(fields)
    rope = read_rope(fields, sizes.head_dim, partial=True, default_fraction=0.5)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn", sizes, sizes.attention(), rope=rope, qkv_bias=biased, rotates_pairs=True
            ),
            after_attention=RMSNorm(f"{name}.post_self_attn_layernorm", sizes.embed, eps),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=fused_gated_mlp(f"{name}.mlp", sizes, mlp, activation),
            after_feed_forward=RMSNorm(f"{name}.post_mlp_layernorm", sizes.embed, eps),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)
