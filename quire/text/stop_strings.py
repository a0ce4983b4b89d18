"""Strings that end a generation, found in text that arrives in pieces."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from quire.errors import InvalidRequest, invalid

MAX_STOPS = 16  # of one request, where no setting says otherwise
MAX_STOP_CHARACTERS = 4096  # of one stop string


class Released(NamedTuple):
    """`text` may be sent; `stop` is the stop string that ended the generation, if one did."""

    text: str
    stop: str | None = None


def check_stops(stops: Sequence[str], max_stops: int) -> None:
    """Refuse stop strings that are too many, empty or too long."""
    if len(stops) > max_stops:
        raise InvalidRequest(
            f"the number of strings in stop is {len(stops)}; it must be at most {max_stops}", param="stop"
        )
    for index, stop in enumerate(stops):
        if not stop:
            raise invalid(f"stop[{index}]", "is empty; a stop string has at least 1 character")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise invalid(f"stop[{index}]", f"has {len(stop)} characters; the limit is {MAX_STOP_CHARACTERS}")


class StopStrings:
    """Searches one request's text for its stop strings. Owned by the request.

    What is released does not depend on how the text is cut into pieces: it is the text up to the match that begins
    first, and of the matches that begin there the shortest, which is the one complete first. Text that may yet turn
    out to begin such a match is held back, and nothing else is. Text after the match is dropped.

    A character costs the same amortized time for each stop string, however long they and the text held back are.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string itself is released too."""
        check_stops(stops, len(stops))
        self._searches = [_Search(stop) for stop in set(stops)]
        self._begins = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        # A match within the text held back, where an earlier one is still possible: its begin, and the stop string.
        self._match: tuple[int, str] | None = None
        self._found: str | None = None

    def push(self, text: str) -> Released:
        """The text that may be sent now that `text` follows."""
        if self._found is not None:
            return Released("", self._found)
        if not self._held and self._begins.isdisjoint(text):
            return Released(text)  # the usual case, and this runs for every token
        return self._search(text)

    def flush(self) -> Released:
        """The text that is still held back, once no more follows."""
        held, self._held = self._held, ""
        return Released(held, self._found) if self._match is None else self._stop_at(held, *self._match)

    def _search(self, text: str) -> Released:
        begins, searches, match = self._begins, self._searches, self._match
        is_open = bool(self._held)  # a stop string has begun and is not complete
        open_at = 0  # the earliest that has
        index = len(self._held)
        whole = self._held + text
        for char in text:
            index += 1
            if not is_open:
                open_at = index
                if char not in begins:
                    continue
            open_at = index
            for search in searches:
                begin = index - search.advance(char)
                if search.is_complete:
                    if match is None or begin < match[0]:
                        match = begin, search.stop
                elif begin < open_at:
                    open_at = begin
            if match is not None and match[0] <= open_at:
                return self._stop_at(whole, *match)
            is_open = open_at < index
        self._match = None if match is None else (match[0] - open_at, match[1])
        self._held = whole[open_at:]
        return Released(whole[:open_at])

    def _stop_at(self, text: str, begin: int, stop: str) -> Released:
        self._held = ""
        self._match = None
        self._found = stop
        return Released(text[: begin + len(stop) if self._include else begin], stop)


class _Search:
    """Knuth, Morris and Pratt's search for one stop string. Its table grows with the longest beginning that was met."""

    __slots__ = ("_fallbacks", "_known", "is_complete", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.is_complete = False  # the last character completed it
        self._known = 0  # characters of the stop string that the text ends with
        # By the number of known characters: how many are known still when the next one is another.
        self._fallbacks = array("H", (0, 0))

    def advance(self, char: str) -> int:
        """The number of the stop string's characters that the text ends with, now that `char` follows."""
        stop, known, fallbacks = self.stop, self._known, self._fallbacks
        while known and stop[known] != char:
            known = fallbacks[known]
        if stop[known] != char:
            self._known = 0
            self.is_complete = False
            return 0
        known += 1
        self.is_complete = known == len(stop)
        if self.is_complete:
            self._known = 0  # a later match of the same string starts later, so it does not matter
            return known
        if known == len(fallbacks):
            fallbacks.append(self._fallback(known))
        self._known = known
        return known

    def _fallback(self, known: int) -> int:
        """The longest beginning of the stop string that ends its first `known` characters and is not all of them."""
        stop, fallbacks = self.stop, self._fallbacks
        last = stop[known - 1]
        fallback = fallbacks[known - 1]
        while fallback and stop[fallback] != last:
            fallback = fallbacks[fallback]
        return fallback + 1 if stop[fallback] == last else 0
