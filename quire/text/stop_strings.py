"""Strings that end a generation, found in text that arrives in pieces."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from quire.errors import InvalidRequest


class Released(NamedTuple):
    """`text` may be sent; `stop` is the stop string that ended the generation, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Searches one request's text for its stop strings. Owned by the request.

    What is released does not depend on how the text is cut into pieces: it is the text up to the match that begins
    first, and of the matches that begin there the shortest, which is the one complete first. Text that may yet turn
    out to begin such a match is held back, and nothing else is. Text after the match is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string itself is released too."""
        for index, stop in enumerate(stops):
            if not stop:
                raise InvalidRequest(f"stop[{index}]: empty; a stop string has at least 1 character")
        self._stops = sorted(set(stops), key=len)
        self._include = include
        self._held = ""
        self._found: str | None = None
        # Alternatives are tried in order, so at one place the shortest is found.
        self._match = re.compile("|".join(map(re.escape, self._stops))) if stops else None
        self._begin = re.compile(
            "[" + re.escape("".join(sorted({stop[0] for stop in self._stops}))) + "]" if stops else ""
        )

    @property
    def found(self) -> str | None:
        """The stop string that ended the generation, if one did."""
        return self._found

    def push(self, text: str) -> Released:
        """What may be sent now that `text` follows."""
        if self._found is not None:
            return Released("", self._found)
        if self._match is None or not text:
            return Released(text)
        if not self._held and self._begin.search(text) is None:
            return Released(text)  # the usual case, and this runs for every token
        text = self._held + text
        begin = self._open_at(text)
        match = self._match.search(text)
        if match is not None and match.start() <= begin:
            return self._stop_at(text, match)
        self._held = text[begin:]
        return Released(text[:begin])

    def flush(self) -> Released:
        """What is still held back, once no text follows."""
        held, self._held = self._held, ""
        match = self._match.search(held) if self._match is not None else None
        return Released(held, self._found) if match is None else self._stop_at(held, match)

    def _open_at(self, text: str) -> int:
        """Where the earliest stop string begins that reaches the end of the text, cut off or not; else the end."""
        longest = len(self._stops[-1])
        for place in self._begin.finditer(text, max(0, len(text) - longest + 1)):
            tail = text[place.start() :]
            if any(stop.startswith(tail) for stop in self._stops):
                return place.start()
        return len(text)

    def _stop_at(self, text: str, match: re.Match[str]) -> Released:
        self._held = ""
        self._found = match.group()
        return Released(text[: match.end() if self._include else match.start()], self._found)
