"""EXAONE 4: norms come after the blocks, and layers that see everything beside others with windows have no rope."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import Sizes, attention, decoder, gated_mlp, read_layer_types, read_sizes


def exaone4(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-5)
    activation = read_activation(fields)
    rope = read_rope(fields, sizes.head_dim)
    windows = _windows(fields, sizes)
    rotates_all = fields.is_null("sliding_window")

    def layer(index: int, name: str) -> DecoderLayer:
        window = windows[index]
        return DecoderLayer(
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(window=window),
                rope=rope if rotates_all or window is not None else None,
                q_norm=RMSNorm(f"{name}.self_attn.q_norm", sizes.head_dim, eps),
                k_norm=RMSNorm(f"{name}.self_attn.k_norm", sizes.head_dim, eps),
            ),
            after_attention=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
            after_feed_forward=RMSNorm(f"{name}.post_feedforward_layernorm", sizes.embed, eps),
        )

    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=rope.max_positions)


def _windows(fields: Fields, sizes: Sizes) -> list[int | None]:
    """The window of each layer; without `sliding_window` none has one."""
    if fields.is_null("sliding_window"):
        return [None] * sizes.layers
    pattern = 4 if "layer_types" in fields else fields.integer("sliding_window_pattern", 4)
    slides = read_layer_types(fields, sizes, lambda index: (index + 1) % pattern != 0)
    window = fields.integer("sliding_window", 4096)
    return [window if one else None for one in slides]
