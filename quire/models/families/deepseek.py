"""DeepSeek V2 and V3: latent attention, and experts in groups beside shared ones."""

from collections.abc import Callable
from functools import partial

from quire.models.families.glm4_moe import read_grouped_router, read_groups, without_layers_behind
from quire.models.fields import Fields
from quire.models.parts.decoder import Decoder, DecoderLayer
from quire.models.parts.feed_forward import FeedForward, SharedExperts, read_activation
from quire.models.parts.latent_attention import LatentSizes, latent_attention
from quire.models.parts.norm import RMSNorm
from quire.models.parts.projection import router
from quire.models.parts.rope import Rope, read_rope, yarn_scale
from quire.models.parts.routing import GroupedSoftmaxRouter, Router
from quire.models.parts.standard import Sizes, decoder, experts, gated_mlp, read_expert_counts

# (fields, name, sizes, number of experts, number of those that a token visits)
ReadRouter = Callable[[Fields, str, Sizes, int, int], Router]


def deepseek_v2(fields: Fields) -> Decoder:
    fields.only("norm_topk_prob", False)
    return _deepseek(fields, _softmax_router, rotates_pairs=True, num_dense=0, num_experts=64, num_shared=2)


def deepseek_v3(fields: Fields) -> Decoder:
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    read_router = partial(read_grouped_router, defaults=(8, 4, 2.5))
    rotates_pairs = fields.flag("rope_interleave", True)
    return _deepseek(fields, read_router, rotates_pairs=rotates_pairs, num_dense=3, num_experts=256, num_shared=1)


def _deepseek(
    fields: Fields,
    read_router: ReadRouter,
    *,
    rotates_pairs: bool,
    num_dense: int,
    num_experts: int,
    num_shared: int,
) -> Decoder:
    """The numbers are the defaults of the family's config class."""
    fields.only("moe_layer_freq", 1)
    latents, scale, rope = _read_latents(fields, rotates_pairs)
    sizes = Sizes(
        vocab=fields.integer("vocab_size"),
        embed=latents.embed,
        layers=fields.integer("num_hidden_layers"),
        kv_heads=1,
        group=latents.heads,
        head_dim=latents.rank + latents.rotated,
    )
    eps = fields.number("rms_norm_eps", 1e-6)
    biased, mlp_biased = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    mlp, expert_mlp = fields.integer("intermediate_size"), fields.integer("moe_intermediate_size")
    activation = read_activation(fields)
    count, chosen = read_expert_counts(fields, sizes, default_experts=num_experts, default_chosen=8)
    shared = fields.integer("n_shared_experts", num_shared)
    dense = fields.whole("first_k_dense_replace", num_dense)

    def feed_forward(index: int, name: str) -> FeedForward:
        if index < dense:
            return gated_mlp(name, sizes, mlp, activation, biased=mlp_biased)
        choice = read_router(fields, f"{name}.gate", sizes, count, chosen)
        return SharedExperts(
            experts(f"{name}.experts", sizes, expert_mlp, count, activation, choice),
            gated_mlp(f"{name}.shared_experts", sizes, expert_mlp * shared, activation, biased=mlp_biased),
        )

    def layer(index: int, name: str) -> DecoderLayer:
        return DecoderLayer(
            before_attention=RMSNorm(f"{name}.input_layernorm", sizes.embed, eps),
            attention=latent_attention(f"{name}.self_attn", latents, scale, rope, biased=biased),
            before_feed_forward=RMSNorm(f"{name}.post_attention_layernorm", sizes.embed, eps),
            feed_forward=feed_forward(index, f"{name}.mlp"),
        )

    norm = RMSNorm("model.norm", sizes.embed, eps)
    rename = partial(without_layers_behind, sizes.layers)
    return decoder(fields, sizes, layer, norm, max_positions=rope.max_positions, rename=rename)


def _read_latents(fields: Fields, rotates_pairs: bool) -> tuple[LatentSizes, float, Rope]:
    """The sizes, the scale of scores, and the rope. Where that is stretched, so are scores."""
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.unsupported("num_key_value_heads", f"latent attention has as many as queries, {heads}")
    sizes = LatentSizes(
        embed=fields.integer("hidden_size"),
        heads=heads,
        rank=fields.integer("kv_lora_rank", 512),
        plain=fields.integer("qk_nope_head_dim", 128),
        rotated=fields.integer("qk_rope_head_dim", 64),
        value=fields.integer("v_head_dim", 128),
        query_rank=None if fields.is_null("q_lora_rank") else fields.integer("q_lora_rank", 1536),
        rotates_pairs=rotates_pairs,
    )
    rope = read_rope(fields, sizes.rotated)
    parameters = fields.within("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")
    scale = (sizes.plain + sizes.rotated) ** -0.5
    rope_type = parameters.get("rope_type") or parameters.get("type")
    if rope_type not in (None, "default") and parameters.number("mscale_all_dim", 0.0):
        scale *= yarn_scale(parameters.number("factor"), parameters.number("mscale_all_dim")) ** 2
    return sizes, scale, rope


def _softmax_router(fields: Fields, name: str, sizes: Sizes, count: int, chosen: int) -> Router:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.unsupported("topk_method", "known are greedy and group_limited_greedy")
    fields.only("scoring_func", "softmax")
    groups = (1, 1) if method == "greedy" else read_groups(fields, count, chosen, (1, 1))
    weight = router(f"{name}.weight", count, sizes.embed)
    return GroupedSoftmaxRouter(chosen, weight, *groups, fields.number("routed_scaling_factor", 1.0))
