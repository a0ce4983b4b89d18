"""Command R7B and A: both blocks of a layer read the same norm, and layers that see everything have no rope."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import LayerNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import attention, decoder, gated_mlp, read_layer_types, read_sizes


def cohere2(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("layer_norm_eps", 1e-5)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)
    rope = read_rope(fields, sizes.head_dim)
    window = fields.integer("sliding_window", 4096)
    pattern = fields.integer("sliding_window_pattern", 4)
    slides = read_layer_types(fields, sizes, lambda index: (index + 1) % pattern != 0)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=LayerNorm(f"{name}.input_layernorm", sizes.embed, eps, biased=False),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(window=window if slides[index] else None),
                rope=rope if slides[index] else None,
                qkv_bias=biased,
                out_bias=biased,
                rotates_pairs=True,
            ),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
            is_parallel=True,
        )

    return decoder(
        fields,
        sizes,
        layer,
        LayerNorm("model.norm", sizes.embed, eps, biased=False),
        max_positions=rope.max_positions,
        tied=True,
        logits_divisor=1 / fields.number("logit_scale", 0.0625),
    )
