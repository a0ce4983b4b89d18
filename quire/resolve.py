"""Undecided settings become decided ones, each with the reason that is logged beside it."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.errors import InvalidRequest

T = TypeVar("T")

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decided value. `str()` of it is the line for the log."""

    name: str
    value: T
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.reason})"


# Platforms as JAX names them.
_DTYPE_BY_PLATFORM = {
    "cpu": ("float32", "CPUs without bfloat16 units would convert at every step"),
    "gpu": ("bfloat16", "half the memory traffic of float32, at full matmul speed"),
    "tpu": ("bfloat16", "what its matrix units compute in"),
}
_PLATFORM_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def resolve_dtype(platform: str, asked: str | None) -> Choice[str]:
    """The dtype of weights and activations."""
    if asked is not None and asked != "auto":
        if asked not in DTYPES:
            raise InvalidRequest(f"dtype is {asked!r}; it can be {', '.join(DTYPES)} or auto")
        return Choice("dtype", asked, "asked for")
    kind = _PLATFORM_ALIASES.get(platform, platform)
    if kind not in _DTYPE_BY_PLATFORM:
        known = ", ".join((*_DTYPE_BY_PLATFORM, *_PLATFORM_ALIASES))
        raise InvalidRequest(f"no dtype is known to suit platform {platform!r} ({known} are); ask for one")
    value, reason = _DTYPE_BY_PLATFORM[kind]
    return Choice("dtype", value, f"{platform}: {reason}")
