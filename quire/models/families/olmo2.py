"""OLMo 2 and 3: norms come after the blocks, and queries and keys are normalised over all heads together."""

from collections.abc import Sequence

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import HeadsRMSNorm, RMSNorm
from quire.models.parts.rope import Rope, read_rope, read_ropes
from quire.models.parts.standard import Sizes, attention, decoder, gated_mlp, read_layer_types, read_sizes


def olmo2(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    rope = read_rope(fields, sizes.head_dim)
    return _olmo(fields, sizes, [(rope, None)] * sizes.layers)


def olmo3(fields: Fields) -> Decoder:
    """Three layers with windows for each that sees everything; older configs scale the rope of those only."""
    sizes = read_sizes(fields)
    window = fields.integer("sliding_window", 4096)
    slides = read_layer_types(fields, sizes, lambda index: (index + 1) % 4 != 0)
    full, local = read_ropes(fields, sizes.head_dim, default_theta=500_000.0, local_theta=500_000.0)
    return _olmo(fields, sizes, [(local, window) if slides[index] else (full, None) for index in range(sizes.layers)])


def _olmo(fields: Fields, sizes: Sizes, layers: Sequence[tuple[Rope, int | None]]) -> Decoder:
    """`layers`: the rope and the window of each."""
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-5)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)

    def layer(index: int, name: str) -> DecoderLayer:
        rope, window = layers[index]
        q_norm, k_norm = f"{name}.self_attn.q_norm", f"{name}.self_attn.k_norm"
        return DecoderLayer(
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(window=window),
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

    most = max(rope.max_positions for rope, _ in layers)
    return decoder(fields, sizes, layer, RMSNorm("model.norm", sizes.embed, eps), max_positions=most)
