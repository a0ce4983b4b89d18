"""GLM-4.5 and 4.6: experts in groups beside a shared one, and half of each head is rotated."""

from functools import partial

from quire.models.fields import Fields
from quire.models.params import Param, Tensor
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import FeedForward, SharedExperts, read_activation
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import router
from quire.models.parts.rope import read_rope
from quire.models.parts.routing import GroupedRouter
from quire.models.parts.standard import Sizes, attention, decoder, experts, gated_mlp, read_expert_counts, read_sizes


def glm4_moe(fields: Fields) -> Decoder:
    sizes = read_sizes(fields, num_key_value_heads=8)
    mlp, expert_mlp = fields.integer("intermediate_size"), fields.integer("moe_intermediate_size", 1408)
    eps = fields.number("rms_norm_eps", 1e-5)
    biased, normalises_heads = fields.flag("attention_bias", False), fields.flag("use_qk_norm", False)
    activation = read_activation(fields)
    count, chosen = read_expert_counts(fields, sizes, default_experts=128, default_chosen=8)
    num_shared = fields.integer("n_shared_experts", 1)
    num_dense = fields.whole("first_k_dense_replace", 1)
    rope = read_rope(fields, sizes.head_dim, partial=True, default_fraction=0.5)

    def feed_forward(index: int, name: str) -> FeedForward:
        if index < num_dense:
            return gated_mlp(name, sizes, mlp, activation)
        choice = read_grouped_router(fields, f"{name}.gate", sizes, count, chosen)
        return SharedExperts(
            experts(f"{name}.experts", sizes, expert_mlp, count, activation, choice),
            gated_mlp(f"{name}.shared_experts", sizes, expert_mlp * num_shared, activation),
        )

    def head_norm(name: str) -> RMSNorm | None:
        return RMSNorm(name, sizes.head_dim, eps) if normalises_heads else None

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=attention(
                f"{name}.self_attn",
                sizes,
                sizes.attention(),
                rope=rope,
                qkv_bias=biased,
                q_norm=head_norm(f"{name}.self_attn.q_norm"),
                k_norm=head_norm(f"{name}.self_attn.k_norm"),
            ),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=feed_forward(index, f"{name}.mlp"),
        )

    norm = RMSNorm("model.norm", sizes.embed, eps)
    rename = partial(without_layers_behind, sizes.layers)
    return decoder(fields, sizes, layer, norm, max_positions=rope.max_positions, rename=rename)


def without_layers_behind(num_layers: int, name: str) -> str | None:
    """Checkpoints have layers behind the last one that guess the tokens after the next; they are not used."""
    parts = name.split(".")
    is_behind = name.startswith("model.layers.") and parts[2].isdecimal() and int(parts[2]) >= num_layers
    return None if is_behind else name


def read_grouped_router(
    fields: Fields, name: str, sizes: Sizes, count: int, chosen: int, defaults: tuple[int, int, float] = (1, 1, 1.0)
) -> GroupedRouter:
    """A router that sends each token to `chosen` of `count` experts.

    `defaults` are the numbers of groups and of chosen ones, and the multiplier of shares.
    """
    num_groups, chosen_groups = read_groups(fields, count, chosen, defaults[:2])
    bias = Tensor(f"{name}.e_score_correction_bias", (count,))
    return GroupedRouter(
        chosen,
        fields.flag("norm_topk_prob", True),
        router(f"{name}.weight", count, sizes.embed),
        Param((count,), (None,), (bias,), is_float32=True),
        num_groups,
        chosen_groups,
        fields.number("routed_scaling_factor", defaults[2]),
    )


def read_groups(fields: Fields, count: int, chosen: int, defaults: tuple[int, int]) -> tuple[int, int]:
    """The number of groups of experts, and of those that a token visits."""
    num_groups, chosen_groups = fields.integer("n_group", defaults[0]), fields.integer("topk_group", defaults[1])
    if count % num_groups or count // num_groups < 2:
        raise fields.invalid("n_group", f"{count} experts are not groups of the same size, of two at least", num_groups)
    if chosen_groups > num_groups:
        raise fields.invalid("topk_group", f"there are {num_groups} groups", chosen_groups)
    allowed = count // num_groups * chosen_groups
    if chosen > allowed:
        raise fields.invalid("num_experts_per_tok", f"the chosen groups have {allowed} experts", chosen)
    return num_groups, chosen_groups
