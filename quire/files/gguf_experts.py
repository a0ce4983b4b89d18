"""The config of experts from the metadata of a GGUF file."""

from typing import Any

from quire.errors import InvalidCheckpoint
from quire.files.gguf import GGUFHeader
from quire.files.gguf_architecture import GGUFArchitecture
from quire.files.gguf_keys import MetadataKeys

MAX_EXPERTS = 1024  # of a layer
_SOFTMAX = 1  # as `expert_gating_func` numbers them


def qwen3_moe_fields(keys: MetadataKeys, feed_forward_length: int) -> dict[str, Any]:
    """Files do not say that shares are normalised, which all models of this architecture do."""
    keys.only("expert_gating_func", _SOFTMAX)
    count, chosen = _counts(keys)
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", feed_forward_length // chosen),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
    }


def check_expert_tensors(header: GGUFHeader, architecture: GGUFArchitecture, count: int) -> None:
    """Every tensor of experts has a matrix for each of them."""
    for tensor in header.tensors.values():
        if architecture.expert_name(tensor.name, 0) is not None and tensor.shape[0] != count:
            raise InvalidCheckpoint(
                f"{tensor.path}: tensor {tensor.name} has {tensor.shape[0]} experts; "
                f"{header.architecture}.expert_count is {count}"
            )


def _counts(keys: MetadataKeys) -> tuple[int, int]:
    """The number of experts, and of those that a token visits."""
    count = keys.integer("expert_count", at_most=MAX_EXPERTS)
    return count, keys.integer("expert_used_count", at_most=count)
