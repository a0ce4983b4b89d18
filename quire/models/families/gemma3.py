"""Gemma 3, its text part: five layers with windows and a rope of their own for each that sees everything."""

from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.rope import read_ropes
from quire.models.parts.standard import attention, decoder, gated_mlp, read_layer_types, read_sizes


def gemma3(fields: Fields) -> Decoder:
    if "attn_logit_softcapping" in fields:
        raise fields.unsupported("attn_logit_softcapping", "this family normalises queries and keys instead")
    # Files of the larger models leave out what their config class has a value for.
    sizes = read_sizes(fields, vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    mlp = fields.integer("intermediate_size")
    eps = fields.number("rms_norm_eps", 1e-6)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    window = fields.integer("sliding_window", 4096)
    pattern = fields.integer("sliding_window_pattern", 6)
    slides = read_layer_types(fields, sizes, lambda index: (index + 1) % pattern != 0)
    scale = fields.number("query_pre_attn_scalar", 256) ** -0.5
    global_rope, local_rope = read_ropes(
        fields, sizes.head_dim, default_theta=1_000_000.0, local_theta=10_000.0, local_field="rope_local_base_freq"
    )

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(name, size, eps, offset=1.0)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=norm(f"{name}.input_layernorm", sizes.embed),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(scale=scale, window=window if slides[index] else None),
                rope=local_rope if slides[index] else global_rope,
                qkv_bias=biased,
                out_bias=biased,
                q_norm=norm(f"{name}.self_attn.q_norm", sizes.head_dim),
                k_norm=norm(f"{name}.self_attn.k_norm", sizes.head_dim),
            ),
            after_attention=norm(f"{name}.post_attention_layernorm", sizes.embed),
            before_feed_forward=norm(f"{name}.pre_feedforward_layernorm", sizes.embed),
            feed_forward=gated_mlp(f"{name}.mlp", sizes, mlp, activation),
            after_feed_forward=norm(f"{name}.post_feedforward_layernorm", sizes.embed),
        )

    return decoder(
        fields,
        sizes,
        layer,
        norm("model.norm", sizes.embed),
        max_positions=global_rope.max_positions,
        tied=True,
        rename=text_name,
        embedding_multiplier=sizes.embed**0.5,
        logits_softcap=fields.optional_number("final_logit_softcapping"),
    )


def text_name(name: str) -> str | None:
    """The text model's tensors, as checkpoints with a vision tower and without one name them."""
    for outer in ("language_model.", "model.language_model."):
        if name.startswith(outer):
            inner = name.removeprefix(outer)
            return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"
    parts = name.removeprefix("model.")
    return None if parts.startswith(("vision_tower.", "vision_model.", "multi_modal_projector.")) else name
