"""The settings that decide sizes and numbers. All members of a group have those of the leader."""

from collections.abc import Iterable
from typing import Any

from quire.settings.choice import Choice
from quire.settings.config import Config

SHARED_SETTINGS = (
    "dtype",
    "quantize",
    "kv_cache_dtype",
    "random_seed",
    "page_size",
    "num_pages",
    "prefix_caching",
    "snapshots",
    "max_total_tokens",
    "max_batch_size",
    "max_batch_prefill_tokens",
    "max_burst",
    "speculate",
    "memory_fraction",
    "tensor_parallel",
    "compile_threads",
)


def shared_settings(config: Config, choices: Iterable[Choice[Any]]) -> dict[str, Any]:
    """Their values as they were decided."""
    decided = {choice.name: choice.value for choice in choices}
    return {name: decided.get(name, getattr(config, name)) for name in SHARED_SETTINGS}
