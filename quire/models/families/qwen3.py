"""Qwen3: queries and keys of each head are normalised before they are rotated."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import attention, decoder, gated_mlp, read_sizes, read_windows


def qwen3(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, head_dim=128)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)
    windows = read_windows(fields, sizes)
    rope = read_rope(fields, sizes.head_dim)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(window=windows[index]),
                rope=rope,
                qkv_bias=biased,
                out_bias=biased,
                q_norm=RMSNorm(f"{name}.self_attn.q_norm", sizes.head_dim, eps),
                k_norm=RMSNorm(f"{name}.self_attn.k_norm", sizes.head_dim, eps),
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)
