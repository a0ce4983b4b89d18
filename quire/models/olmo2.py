"""OLMo 2: norms come after the blocks, and queries and keys are normalised over all heads together."""

from quire.models.decoder import Decoder, DecoderLayer
from quire.models.feed_forward import read_activation
from quire.models.fields import Fields
from quire.models.norm import HeadsRMSNorm, RMSNorm
from quire.models.rope import read_rope
from quire.models.standard import attention, decoder, gated_mlp, read_sizes


def olmo2(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-5)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)
    rope = read_rope(fields, sizes.head_dim)

    def layer(index: int, name: str) -> DecoderLayer:
        q_norm, k_norm = f"{name}.self_attn.q_norm", f"{name}.self_attn.k_norm"
        return DecoderLayer(
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(),
                rope=rope,
                qkv_bias=biased,
                out_bias=biased,
                q_norm=HeadsRMSNorm(q_norm, sizes.kv_heads, sizes.head_dim, eps, group=sizes.group),
                k_norm=HeadsRMSNorm(k_norm, sizes.kv_heads, sizes.head_dim, eps),
            ),
            after_attention=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
            after_feed_forward=RMSNorm(f"{name}.post_feedforward_layernorm", sizes.embed, eps),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)
