"""When a sequence ends by what it generated."""

from quire.request import FinishReason, Request


class Stopping:
    """The end conditions of one request. Strings are not among them: the front end looks for those in the text."""

    __slots__ = ("_ends", "_min_tokens", "_stops", "max_tokens", "watched")

    def __init__(self, request: Request) -> None:
        self.max_tokens = request.max_tokens
        self._min_tokens = request.min_tokens
        self._ends = frozenset() if request.ignore_end else frozenset(request.end_ids)
        self._stops = frozenset(request.stop_ids)
        self.watched = self._ends | self._stops  # no other token ends it before its length

    def reason(self, token: int, count: int) -> FinishReason | None:
        """Why `token`, the `count`-th generated one, is the last; None when it is not.

        A token that ends the sequence exactly at its length is still an end, not a cut.
        """
        if count >= self._min_tokens:
            if token in self._ends:
                return FinishReason.END
            if token in self._stops:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if count >= self.max_tokens else None

    def ends(self, tokens: list[int], count: int) -> bool:
        """Whether any of `tokens`, which follow `count` generated ones, is the last."""
        return any(self.reason(token, count + n) is not None for n, token in enumerate(tokens, start=1))
