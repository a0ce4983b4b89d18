"""Qwen3-Next: three layers with the gated delta rule, then one with gated attention; experts beside a shared one."""

from quire.models.fields import Fields
from quire.models.params import Param, Tensor
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import FeedForward, SharedExperts, read_activation
from quire.models.parts.gated_delta import gated_delta
from quire.models.parts.mixer import Mixer
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import router
from quire.models.parts.rope import read_rope
from quire.models.parts.routing import SoftmaxRouter
from quire.models.parts.standard import (
    attention,
    decoder,
    experts,
    gated_mlp,
    read_expert_counts,
    read_recurrent_layers,
    read_sizes,
)
from quire.ops.recurrence import RecurrentSpec


def qwen3_next(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, num_key_value_heads=2, head_dim=256)
    eps = fields.number("rms_norm_eps", 1e-6)
    biased = fields.flag("attention_bias", False)
    activation = read_activation(fields)
    count, chosen = read_expert_counts(fields, sizes, default_experts=512, default_chosen=10)
    normalised = fields.flag("norm_topk_prob", True)
    sparse_step = fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.integers("mlp_only_layers") if "mlp_only_layers" in fields else []
    recurrent, interval = _read_recurrence(fields), fields.integer("full_attention_interval", 4)
    is_recurrent = read_recurrent_layers(fields, sizes, lambda index: (index + 1) % interval != 0)
    rope = read_rope(fields, sizes.head_dim, partial=True, default_fraction=0.25)

    def norm(name: str, size: int = sizes.embed) -> RMSNorm:
        return RMSNorm(name, size, eps, offset=1.0)

    def mixer(index: int, name: str) -> Mixer:
        if is_recurrent[index]:
            return gated_delta(f"{name}.linear_attn", recurrent, sizes.embed, eps)
        return attention(
            f"{name}.self_attn",
            sizes,
            sizes.attention(),
            rope=rope,
            qkv_bias=biased,
            out_bias=biased,
            q_norm=norm(f"{name}.self_attn.q_norm", sizes.head_dim),
            k_norm=norm(f"{name}.self_attn.k_norm", sizes.head_dim),
            is_gated=True,
        )

    def feed_forward(index: int, name: str) -> FeedForward:
        if index in dense_layers or (index + 1) % sparse_step:
            return gated_mlp(name, sizes, fields.integer("intermediate_size", 5632), activation)
        mlp, shared = (fields.integer(one, 512) for one in ("moe_intermediate_size", "shared_expert_intermediate_size"))
        choice = SoftmaxRouter(chosen, normalised, router(f"{name}.gate.weight", count, sizes.embed))
        gate = Tensor(f"{name}.shared_expert_gate.weight", (1, sizes.embed))
        return SharedExperts(
            experts(f"{name}.experts", sizes, mlp, count, activation, choice),
            gated_mlp(f"{name}.shared_expert", sizes, shared, activation),
            Param(gate.shape, (None, "embed"), (gate,), num_contracted=1),
        )

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=norm(f"{name}.input_layernorm"),
            attention=mixer(index, name),
            before_feed_forward=norm(f"{name}.post_attention_layernorm"),
            feed_forward=feed_forward(index, f"{name}.mlp"),
        )

    def rename(name: str) -> str | None:
        """Checkpoints have layers that guess the tokens after the next; they are not used."""
        return None if name.startswith("mtp.") else name

    return decoder(fields, sizes, layer, norm("model.norm"), max_positions=rope.max_positions, rename=rename)


def _read_recurrence(fields: Fields) -> RecurrentSpec:
    heads, values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if values % heads:
        raise fields.invalid("linear_num_key_heads", f"it does not divide linear_num_value_heads = {values}", heads)
    fields.only("hidden_act", "silu")  # it is that of the convolution too
    group = values // heads
    key_dim, value_dim = fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
    taps = fields.integer("linear_conv_kernel_dim", 4)
    return RecurrentSpec(heads, group, key_dim, value_dim, 2 * key_dim + group * value_dim, taps, corrects=True)
