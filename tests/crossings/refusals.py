"""Capabilities that are refused together, with the words of the refusal and the moment at which it comes."""

from enum import Enum, auto
from typing import NamedTuple

from tests.crossings.capability import Capability


class Moment(Enum):
    """All of them are before anything is served."""

    REQUEST = auto()  # the request is made
    PLAN = auto()  # an engine is planned, before a weight is read
    GPU = auto()  # the same, on a GPU
    SERVE = auto()  # a server starts, before its processes do


class Refusal(NamedTuple):
    one: str
    other: str
    words: str  # a pattern
    moment: Moment

    def __str__(self) -> str:
        return f"{self.one} x {self.other}"


_RECURRENT = "it does not go with the recurrent layers of "
_ENDS_ITSELF = "with a grammar, which says where to end"
_ON_GPUS = "it does not go with reproducible on a GPU"
_IN_GROUPS = "it does not go with group_size = 2: an engine of several processes has none"
_GUIDED = ("grammar", "forced tokens", "thinking budget", "lost grammar")

_IGNORES_END = f"ignore_end is True; it must be false {_ENDS_ITSELF}"
_HAS_LEAST = rf"min_tokens is \d; it must be 0 {_ENDS_ITSELF}"

REFUSALS = (
    *(Refusal("no end", one, _IGNORES_END, Moment.REQUEST) for one in _GUIDED),
    *(Refusal("least tokens", one, _HAS_LEAST, Moment.REQUEST) for one in _GUIDED),
    Refusal("recurrent layers", "guesses by lookup", f"speculate is 3; {_RECURRENT}", Moment.PLAN),
    Refusal("recurrent layers", "guesses by draft", f"speculate is 3; {_RECURRENT}", Moment.PLAN),
    Refusal("recurrent layers", "host tier", f"host_cache_gib is 0.01; {_RECURRENT}", Moment.PLAN),
    Refusal("recurrent layers", "cache folder", f"host_cache_gib is .*; {_RECURRENT}", Moment.PLAN),
    Refusal("latent attention", "8-bit pages", "kv_cache_dtype is int8; .* latent attention layers of", Moment.PLAN),
    Refusal(
        "windows alone",
        "guesses by draft",
        "draft_model is .*; .* the windows of all layers of",
        Moment.PLAN,
    ),
    Refusal("no prefix cache", "host tier", "host_cache_gib is 0.01; it needs prefix_caching", Moment.PLAN),
    Refusal("no prefix cache", "cache folder", "cache_folder is .*; it needs prefix_caching", Moment.SERVE),
    Refusal("reproducible on a GPU", "guesses by lookup", f"speculate is 3; {_ON_GPUS}", Moment.GPU),
    Refusal("reproducible on a GPU", "guesses by draft", f"speculate is 3; {_ON_GPUS}", Moment.GPU),
    Refusal("reproducible on a GPU", "adapters", f"lora_adapters is .*; {_ON_GPUS}", Moment.GPU),
    Refusal("reproducible on a GPU", "bursts", f"max_burst is 4; {_ON_GPUS}", Moment.GPU),
    Refusal(
        "reproducible on a GPU", "recurrent layers", ".* does not go with the (expert|recurrent) layers", Moment.GPU
    ),
    Refusal(
        "reproducible on a GPU",
        "latent attention",
        ".* does not go with the (expert|latent attention) layers",
        Moment.GPU,
    ),
    Refusal("reproducible on a GPU", "sinks", ".* does not go with the expert layers", Moment.GPU),
    Refusal("groups", "adapters", f"lora_adapters is .*; {_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "guesses by draft", f"draft_model is .*; {_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "host tier", f"host_cache_gib is 0.01; {_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "cache folder", f"cache_folder is .*; {_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "roles", f"role is both; {_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "several engines", "data_parallel is 2; it does not go with group_size = 2", Moment.SERVE),
    Refusal("roles", "several engines", "data_parallel is 2; it does not go with role = both", Moment.SERVE),
    Refusal("roles", "no prefix cache", "role is both; it needs prefix_caching", Moment.SERVE),
)
_BY_PAIR = {frozenset((one.one, one.other)): one for one in REFUSALS}


def refusal(one: Capability, other: Capability) -> Refusal | None:
    return _BY_PAIR.get(frozenset((one.name, other.name)))


def are_exclusive(one: Capability, other: Capability) -> bool:
    """True if they are refused together, or fill the same place."""
    return refusal(one, other) is not None or bool(one.fills and one.fills == other.fills)
