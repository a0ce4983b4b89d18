"""Fields inside messages and tools that the API does not know."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import invalid
from quire.server.api.validation import MAX_NAME

_INDEX = re.compile(r"\[\d+\]")


class UnknownFields:
    """Collects the names of unknown fields, each once, however many messages have it."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # the first place of each

    @property
    def names(self) -> list[str]:
        return list(self._first)

    def note(self, where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
        """Note the fields of the object at `where` that are not known."""
        for name in given:
            if name not in known:
                place = f"{where}.{name[:MAX_NAME]}"
                self._first.setdefault(_INDEX.sub("[]", place), place)

    def refuse(self) -> None:
        """Raise if there are any, for strict servers."""
        for place in self._first.values():
            raise invalid(place, "is not a field of this route")
