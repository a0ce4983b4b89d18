"""A decided setting, with its reason."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

ASKED_FOR = "asked for"


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A decided value. `str()` of it is the line for the log."""

    name: str
    value: T
    reason: str

    @property
    def is_automatic(self) -> bool:
        return self.reason != ASKED_FOR

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.reason})"


def chosen(name: str, asked: T | None, default: T, reason: str) -> Choice[T]:
    return Choice(name, default, reason) if asked is None else Choice(name, asked, ASKED_FOR)
