"""SmolLM3: llama, with a layer without rope after every few that have it."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import Sizes, attention, decoder, gated_mlp, read_layer_types, read_sizes


def smollm3(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    attention_bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    activation = read_activation(fields)
    rotates = read_rotated_layers(fields, sizes)
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window", False) else None
    slides = read_layer_types(fields, sizes, lambda index: not rotates[index])
    if "layer_types" in fields and any(slides) and window is None:
        raise fields.invalid("layer_types", "there are sliding layers, but no sliding_window or no use_sliding_window")
    rope = read_rope(fields, sizes.head_dim, default_theta=2_000_000.0)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(window=window if slides[index] else None),
                rope=rope if rotates[index] else None,
                qkv_bias=attention_bias,
                out_bias=attention_bias,
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation, biased=mlp_bias),
        )

    return decoder(
        fields,
        sizes,
        layer,
        RMSNorm("model.norm", sizes.embed, eps),
        max_positions=rope.max_positions,
        tied=True,
    )


def read_rotated_layers(fields: Fields, sizes: Sizes) -> list[bool]:
    """For each layer, True if it has a rope; `no_rope_layers` lists 1 for those that do."""
    if fields.get("no_rope_layers") not in (None, []):  # some files have an empty list for none
        return [bool(item) for item in fields.integers("no_rope_layers", sizes.layers)]
    interval = fields.integer("no_rope_layer_interval", 4)
    return [(index + 1) % interval != 0 for index in range(sizes.layers)]
