"""Gemma 2: windows in every other layer, capped scores and logits, norms before and after each block."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_rope
from quire.models.parts.standard import attention, decoder, gated_mlp, read_layer_types, read_sizes


def gemma2(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, num_key_value_heads=4, head_dim=256)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    window = fields.integer("sliding_window", 4096)
    slides = read_layer_types(fields, sizes, lambda index: index % 2 == 0)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    softcap = _cap(fields, "attn_logit_softcapping", 50.0)
    rope = read_rope(fields, sizes.head_dim)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, sizes.embed, eps, offset=1.0)

    def layer(index: int, name: str) -> DecoderLayer:
        spec = sizes.attention(scale=scale, window=window if slides[index] else None, softcap=softcap)
        return DecoderLayer(
            before_attention=norm(f"{name}.input_layernorm"),
            attention=attention(f"{name}.self_attn", sizes, spec, rope=rope, qkv_bias=biased, out_bias=biased),
            after_attention=norm(f"{name}.post_attention_layernorm"),
            before_feed_forward=norm(f"{name}.pre_feedforward_layernorm"),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
            after_feed_forward=norm(f"{name}.post_feedforward_layernorm"),
        )

    return decoder(
        fields,
        sizes,
        layer,
        norm("model.norm"),
        max_positions=rope.max_positions,
        tied=True,
        embedding_multiplier=sizes.embed**0.5,
        logits_softcap=_cap(fields, "final_logit_softcapping", 30.0),
    )


def _cap(fields: Fields, name: str, default: float) -> float | None:
    return None if fields.is_null(name) else fields.number(name, default)
