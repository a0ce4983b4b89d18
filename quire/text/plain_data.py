"""Data made of JSON types only."""

from collections.abc import Mapping
from typing import Any

from quire.errors import invalid

_PLAIN_TYPES = frozenset((str, int, float, bool))


def plain_copy(where: str, value: Any) -> Any:
    """A copy made of JSON types only, so that a template finds no method that leads to other objects."""
    try:
        return _copied(value)
    except _NotJson as error:
        raise invalid(f"{where}{error.place}", f": a {error.type_name} is not JSON") from None


class _NotJson(Exception):
    """Collects its path while it is raised: keys may be long and values many, so no path is built in advance."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.type_name = type_name
        self.place = ""


def _copied(value: Any) -> Any:
    if value is None or type(value) in _PLAIN_TYPES:
        return value
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not isinstance(value, (list, tuple)):
        raise _NotJson(type(value).__name__)
    at: Any = None
    copied: dict[Any, Any] = {}
    try:
        for at, item in value.items() if is_mapping else enumerate(value):
            copied[at] = item if type(item) in _PLAIN_TYPES else _copied(item)
        return {str(key): item for key, item in copied.items()} if is_mapping else list(copied.values())
    except _NotJson as error:
        error.place = (f".{at}" if is_mapping else f"[{at}]") + error.place
        raise


def size_of(value: Any) -> int:
    """Characters in the strings of plain data, and one for each other thing."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 1 + sum(size_of(key) + size_of(item) for key, item in value.items())
    return 1 + sum(map(size_of, value)) if isinstance(value, list) else 1
