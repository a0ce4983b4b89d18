"""The config of experts from the metadata of a GGUF file."""

import logging
from collections.abc import Callable
from typing import Any

from quire.errors import InvalidCheckpoint
from quire.files.gguf import GGUFHeader
from quire.files.gguf_architecture import GGUFArchitecture
from quire.files.gguf_keys import MetadataKeys

log = logging.getLogger(__name__)

MAX_EXPERTS = 1024  # of a layer
_SOFTMAX, _SIGMOID = 1, 2  # as `expert_gating_func` numbers them
# Groups, and those of them that a token visits, by gate and number of experts: DeepSeek V3 and V2. Older files leave
# them out.
_PUBLISHED_GROUPS = {(_SIGMOID, 256): (8, 4), (_SOFTMAX, 160): (8, 3)}


def expert_fields(keys: MetadataKeys, header: GGUFHeader, architecture: GGUFArchitecture) -> dict[str, Any]:
    """The fields of experts and of what comes with them; none where the architecture has no experts."""
    read = _FIELDS.get(architecture.model_type)
    if read is None:
        return {}
    count = keys.integer("expert_count", at_most=MAX_EXPERTS)
    _check_tensors(header, architecture, count)
    return {"num_experts_per_tok": keys.integer("expert_used_count", at_most=count), **read(keys, header, count)}


def _qwen3_moe(keys: MetadataKeys, _: GGUFHeader, count: int) -> dict[str, Any]:
    """Files do not say that shares are normalised, which all models of this architecture do."""
    keys.only("expert_gating_func", _SOFTMAX)
    share = keys.integer("feed_forward_length") // keys.integer("expert_used_count")
    return {
        "num_experts": count,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", share),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
    }


def _mixtral(keys: MetadataKeys, header: GGUFHeader, count: int) -> dict[str, Any]:
    keys.only("expert_gating_func", _SOFTMAX)
    keys.only("expert_weights_norm", True)
    window = keys.get("attention.sliding_window")
    return {"num_local_experts": count, "sliding_window": window or None}


def _glm4_moe(keys: MetadataKeys, header: GGUFHeader, count: int) -> dict[str, Any]:
    keys.only("expert_gating_func", _SIGMOID)
    return {
        "n_routed_experts": count,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        **_grouped(keys),
    }


def _deepseek(keys: MetadataKeys, header: GGUFHeader, count: int) -> dict[str, Any]:
    keys.only("expert_gating_func", _SOFTMAX, _SIGMOID)
    gate = keys.get("expert_gating_func") or _SOFTMAX
    groups = _PUBLISHED_GROUPS.get((gate, count), (1, 1))
    if keys.get("expert_group_count") is None and groups != (1, 1):
        words = (
            "%s has no expert_group_count: tokens visit %d of %d groups of its %d experts, as in the published model"
        )
        log.warning(words, header.path, groups[1], groups[0], count)
    fields = {"n_routed_experts": count, **_grouped(keys, groups)}
    if gate == _SIGMOID:
        return fields | {"model_type": "deepseek_v3"}
    return fields | {"topk_method": "greedy" if fields["n_group"] == 1 else "group_limited_greedy"}


def latent_fields(keys: MetadataKeys, num_heads: int) -> dict[str, Any]:
    """The sizes of latent attention. Files have the sizes of heads, and newer ones those of what is cached beside."""
    rank, rotated = keys.integer("attention.kv_lora_rank"), keys.integer("rope.dimension_count")
    is_newer = keys.get("attention.key_length_mla") is not None
    if is_newer:
        keys.must_equal("attention.key_length", rank + rotated)
        keys.must_equal("attention.value_length", rank)
    kind = "_mla" if is_newer else ""
    width = keys.integer(f"attention.key_length{kind}")
    if width <= rotated:
        raise keys.refuse(f"attention.key_length{kind}", width, f"more than rope.dimension_count = {rotated}")
    keys.only("attention.head_count_kv", 1, num_heads)
    ranked = keys.get("attention.q_lora_rank") is not None
    return {
        "num_key_value_heads": num_heads,
        "head_dim": rotated,
        "q_lora_rank": keys.integer("attention.q_lora_rank") if ranked else None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": width - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": keys.integer(f"attention.value_length{kind}"),
    }


def _gpt_oss(keys: MetadataKeys, header: GGUFHeader, count: int) -> dict[str, Any]:
    return {"num_local_experts": count, "intermediate_size": keys.integer("expert_feed_forward_length")}


def _grouped(keys: MetadataKeys, groups: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Groups, shares, and experts that all tokens visit. `groups`, and those that a token visits, where the file does
    not say."""
    return {
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "n_group": keys.integer("expert_group_count", groups[0]),
        "topk_group": keys.integer("expert_group_used_count", groups[1]),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.positive("expert_weights_scale", 1.0),
    }


# By `model_type`.
_FIELDS: dict[str, Callable[[MetadataKeys, GGUFHeader, int], dict[str, Any]]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek,
    "gpt_oss": _gpt_oss,
}


def _check_tensors(header: GGUFHeader, architecture: GGUFArchitecture, count: int) -> None:
    """Every tensor of experts has a matrix for each of them."""
    for tensor in header.tensors.values():
        if architecture.expert_name(tensor.name, 0) is not None and tensor.shape[0] != count:
            raise InvalidCheckpoint(
                f"{tensor.path}: tensor {tensor.name} has {tensor.shape[0]} experts; "
                f"{header.architecture}.expert_count is {count}"
            )
