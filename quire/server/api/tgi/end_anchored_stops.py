"""Stop strings as text-generation-inference finds them."""

from collections.abc import Sequence

MAX_PASS_TOKENS = 1024  # it begins anew after so many, and forgets what it had seen
_WINDOW, _KEPT = 300, 200  # characters


class EndAnchoredStops:
    """Sees a stop string only where a token ends with it, in the last few hundred characters of a pass."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._seen = ""
        self._num_tokens = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """One token's text: nothing is held back, and what matches stays in the answer."""
        self._num_tokens += 1
        if self._num_tokens % MAX_PASS_TOKENS == 0:
            self._seen = ""
            return text, None
        self._seen += text
        if len(self._seen) > _WINDOW:
            self._seen = self._seen[-_KEPT:]
        before_line_end = self._seen.removesuffix("\n")  # it looks by a pattern that ends in $
        return text, next(
            (stop for stop in self._stops if self._seen.endswith(stop) or before_line_end.endswith(stop)), None
        )

    def flush(self) -> tuple[str, str | None]:
        return "", None
