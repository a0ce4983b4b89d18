"""Granite 4: granite with Mamba 2 in most layers, experts or none beside a shared one, and often no rope."""

from quire.models.fields import Fields
from quire.models.params import Param, Tensor
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import Activation, Experts, FeedForward, GatedMLP, SharedExperts, read_activation
from quire.models.parts.mamba2 import mamba2
from quire.models.parts.mixer import Mixer
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import router
from quire.models.parts.rope import read_rope
from quire.models.parts.routing import SoftmaxRouter
from quire.models.parts.standard import (
    Sizes,
    attention,
    decoder,
    mlp_down,
    read_expert_counts,
    read_recurrent_layers,
    read_sizes,
)
from quire.ops.gates import PlainGate
from quire.ops.recurrence import RecurrentSpec

NO_LIMITS = [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]  # JSON has no infinity


def granitemoehybrid(fields: Fields) -> Decoder:
    sizes = read_sizes(fields)
    eps = fields.number("rms_norm_eps", 1e-6)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)
    spec = sizes.attention(scale=fields.number("attention_multiplier", 1.0))
    residual_multiplier = fields.number("residual_multiplier", 1.0)
    is_recurrent = read_recurrent_layers(fields, sizes, lambda index: True)
    recurrent = _read_recurrence(fields, sizes) if any(is_recurrent) else None
    has_conv_bias = fields.flag("mamba_conv_bias", True)
    has_rope = "position_embedding_type" in fields and fields.text("position_embedding_type") == "rope"
    rope = read_rope(fields, sizes.head_dim) if has_rope else None

    def mixer(index: int, name: str) -> Mixer:
        if is_recurrent[index]:
            assert recurrent is not None
            return mamba2(f"{name}.mamba", recurrent, sizes.embed, eps, has_bias=has_conv_bias)
        return attention(f"{name}.self_attn", sizes, spec, rope=rope, qkv_bias=biased, out_bias=biased)

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=mixer(index, name),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=_feed_forward(fields, name, sizes, activation),
            residual_multiplier=residual_multiplier,
        )

    return decoder(
        fields,
        sizes,
        layer,
        RMSNorm("model.norm", sizes.embed, eps),
        max_positions=fields.integer("max_position_embeddings", 2048) if rope is None else rope.max_positions,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )


def _read_recurrence(fields: Fields, sizes: Sizes) -> RecurrentSpec:
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    width = fields.integer("mamba_expand", 2) * sizes.embed
    if width % heads:
        raise fields.invalid("mamba_n_heads", f"it does not divide mamba_expand * hidden_size = {width}", heads)
    fields.only("mamba_d_head", "auto", width // heads)
    if heads % groups:
        raise fields.invalid("mamba_n_groups", f"it does not divide mamba_n_heads = {heads}", groups)
    fields.only("mamba_proj_bias", False)
    fields.only("hidden_act", "silu")  # it is that of the convolution too
    fields.only("time_step_limit", *NO_LIMITS)
    group, key_dim, value_dim = heads // groups, fields.integer("mamba_d_state", 256), width // heads
    taps = fields.integer("mamba_d_conv", 4)
    return RecurrentSpec(groups, group, key_dim, value_dim, group * value_dim + 2 * key_dim, taps, corrects=False)


def _feed_forward(fields: Fields, name: str, sizes: Sizes, activation: Activation) -> FeedForward:
    mlp = fields.integer("shared_intermediate_size", 1024)
    both = Tensor(f"{name}.shared_mlp.input_linear.weight", (2 * mlp, sizes.embed))
    shared = GatedMLP(
        activation,
        gate_up=Param((1, 2, mlp, sizes.embed), ("mlp", None, None, "embed"), (both,), num_contracted=1),
        down=mlp_down(f"{name}.shared_mlp.output_linear.weight", sizes, mlp),
    )
    if fields.whole("num_local_experts", 8) == 0:
        return shared
    count, chosen = read_expert_counts(fields, sizes, default_experts=8, default_chosen=2)
    mlp, name = fields.integer("intermediate_size"), f"{name}.block_sparse_moe"
    gates_and_ups = Tensor(f"{name}.input_linear.weight", (count, 2 * mlp, sizes.embed))
    downs = Tensor(f"{name}.output_linear.weight", (count, sizes.embed, mlp))
    own = Experts(
        PlainGate(activation),
        SoftmaxRouter(chosen, True, router(f"{name}.router.layer.weight", count, sizes.embed)),
        gate_up=Param((count, 1, 2, mlp, sizes.embed), ("experts", "mlp", None, None, "embed"), (gates_and_ups,)),
        down=Param(downs.shape, ("experts", "embed", "mlp"), (downs,)),
    )
    return SharedExperts(own, shared)
