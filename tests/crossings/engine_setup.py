"""The settings of an engine in a crossing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from quire.core.limits import Limits
from quire.reach import Reach

PAGE_SIZE = 4
MAX_TOKENS = 64  # of a sequence
ADAPTERS = ("a", "b", "c")
ADAPTER_SLOTS = 2  # fewer than there are adapters
GUESSES = 3
HOST_PAGES = 60
LAST_MOMENT = 40  # turns of the driver after which nothing happens any more by itself


@dataclass
class EngineSetup:
    """The settings of one engine. Benches make it with a fake executor or with a tiny model.

    `chance` is of the capability that is being switched on.
    """

    chance: Random
    layout: str = "full"
    page_groups: tuple[Reach, ...] = (None,)
    limits: dict[str, Any] = field(default_factory=dict)  # changes of `quire.core.limits.Limits`
    has_few_pages: bool = False
    lookahead: int = 1
    max_burst_s: float = float("inf")
    max_step_s: float = 0.0
    switch_length: int | None = None
    prefix_key: Callable[[int], int] | None = None
    guesses: Literal["", "lookup", "draft"] = ""
    quantize: Literal["none", "int8"] = "none"
    page_dtype: str | None = None
    adapters: tuple[str, ...] = ()
    keeps_folder: bool = False

    @property
    def has_snapshots(self) -> bool:
        return self.limits.get("snapshots") is not None

    def as_limits(self, **sizes: Any) -> Limits:
        """`sizes`: those of the bench."""
        chosen: dict[str, Any] = {
            "page_size": PAGE_SIZE,
            "max_batch_size": 4,
            "max_step_tokens": 20,
            "max_batch_prefill_tokens": 16,
            "max_sequence_tokens": MAX_TOKENS,
            "page_groups": self.page_groups,
            "num_pages": 2,
        }
        chosen |= sizes | self.limits
        if "max_step_tokens" not in self.limits:
            chosen["max_step_tokens"] = chosen["max_batch_size"] + chosen["max_batch_prefill_tokens"]
        if "num_pages" not in self.limits:
            longest = Limits(**chosen).pages_to_start(MAX_TOKENS)
            chosen["num_pages"] = 1 + (longest + 3 if self.has_few_pages else 8 * longest)
        return Limits(**chosen)
