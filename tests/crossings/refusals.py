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


_RECURRENT = r"recurrent layer"
_ENDS_ITSELF = "with a grammar, which says where to end"
_ON_GPUS = "does not go with reproducible on a GPU"
_NOT_IN_GROUPS = r"an engine of several processes \(group_size\) has none"
_GUIDED = ("grammar", "forced tokens", "thinking budget", "lost grammar")

_IGNORES_END = f"ignore_end is True; it must be false {_ENDS_ITSELF}"
_HAS_LEAST = rf"min_tokens is \d; it must be 0 {_ENDS_ITSELF}"

REFUSALS = (
    *(Refusal("no end", one, _IGNORES_END, Moment.REQUEST) for one in _GUIDED),
    *(Refusal("least tokens", one, _HAS_LEAST, Moment.REQUEST) for one in _GUIDED),
    Refusal("recurrent layers", "guesses by lookup", f"speculate is 3; .* has 1 {_RECURRENT}", Moment.PLAN),
    Refusal("recurrent layers", "guesses by draft", f"draft_model .* has {_RECURRENT}s", Moment.PLAN),
    Refusal("recurrent layers", "host tier", f"host_cache_gib is 0.01; .* has 1 {_RECURRENT}", Moment.PLAN),
    Refusal("recurrent layers", "cache folder", f"host_cache_gib is .*; .* has 1 {_RECURRENT}", Moment.PLAN),
    Refusal("latent attention", "8-bit pages", "kv_cache_dtype is int8; the cache of latent attention", Moment.PLAN),
    Refusal("windows alone", "guesses by draft", "draft_model needs a model with layers that read all", Moment.PLAN),
    Refusal("no prefix cache", "host tier", "host_cache_gib is 0.01; it needs prefix_caching", Moment.PLAN),
    Refusal("no prefix cache", "cache folder", "cache_folder is .*; it needs prefix_caching", Moment.SERVE),
    Refusal("reproducible on a GPU", "guesses by lookup", f"speculate is 3, which {_ON_GPUS}", Moment.GPU),
    Refusal("reproducible on a GPU", "guesses by draft", f"speculate is 3, which {_ON_GPUS}", Moment.GPU),
    Refusal("reproducible on a GPU", "adapters", f"lora_adapters is .*, which {_ON_GPUS}", Moment.GPU),
    Refusal("reproducible on a GPU", "bursts", f"max_burst is 4, which {_ON_GPUS}", Moment.GPU),
    Refusal("reproducible on a GPU", "recurrent layers", f"reproducible: .* has (experts|{_RECURRENT}s)", Moment.GPU),
    Refusal("reproducible on a GPU", "latent attention", "reproducible: .* has (experts|latent attention)", Moment.GPU),
    Refusal("reproducible on a GPU", "sinks", "reproducible: .* has experts", Moment.GPU),
    Refusal("groups", "adapters", f"lora_adapters is .*; {_NOT_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "guesses by draft", f"draft_model is .*; {_NOT_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "host tier", f"host_cache_gib is 0.01; {_NOT_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "cache folder", f"cache_folder is .*; {_NOT_IN_GROUPS}", Moment.SERVE),
    Refusal("groups", "roles", r"role is both; an engine of several processes \(--group-size\)", Moment.SERVE),
    Refusal("groups", "several engines", "data_parallel is 2; with group_size", Moment.SERVE),
    Refusal("roles", "several engines", "data_parallel is 2; it must be 1 with role = both", Moment.SERVE),
    Refusal("roles", "no prefix cache", "role is both; it needs prefix_caching", Moment.SERVE),
)
_BY_PAIR = {frozenset((one.one, one.other)): one for one in REFUSALS}


def refusal(one: Capability, other: Capability) -> Refusal | None:
    return _BY_PAIR.get(frozenset((one.name, other.name)))


def are_exclusive(one: Capability, other: Capability) -> bool:
    """True if they are refused together, or fill the same place."""
    return refusal(one, other) is not None or bool(one.fills and one.fills == other.fills)
