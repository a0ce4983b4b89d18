"""An answer token by token, and the masks of what may come next."""

from collections.abc import Sequence

from quire.engine.grammar_masks import Guided, Matcher

WAIT_S = 30.0


class Walk:
    def __init__(self, matcher: Matcher) -> None:
        self._guided = Guided(matcher, 0, ())
        self._length = 0

    def after(self, tokens: Sequence[int] = ()) -> bytes:
        """The mask after `tokens`, which follow those before."""
        for token in tokens:
            self._guided.mask(self._length, WAIT_S)
            self._guided.append([token])
            self._length += 1
        return self._guided.mask(self._length, WAIT_S)
