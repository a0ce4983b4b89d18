"""Rules about tokens: the only ones that are allowed, and sequences that may not be completed."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain

from quire.errors import InvalidRequest


class TokenMatcher:
    """One answer under rules that `quire.request.token_rules` wrote. Implements the engine's Matcher.

    The last token of a banned sequence is forbidden where the answer ends with the tokens before it. Sequences within
    the prompt, or that begin there, are not looked at.
    """

    def __init__(self, rules: str, mask_bytes: int) -> None:
        given = json.loads(rules)
        allowed, banned = given["allowed"], given["banned"]
        for token in (*(allowed or ()), *chain.from_iterable(banned)):
            if not 0 <= token < 8 * mask_bytes:
                raise InvalidRequest(f"grammar names the token {token}; the vocabulary has at most {8 * mask_bytes}")
        self._banned: list[list[int]] = [one for one in banned if len(one) > 1]
        self._tail: list[int] = []  # the last tokens of the answer, as many as the longest sequence needs
        self._reach = max((len(one) - 1 for one in self._banned), default=0)
        mask = bytearray(b"\xff" * mask_bytes) if allowed is None else bytearray(mask_bytes)
        for token in allowed or ():
            mask[token >> 3] |= 1 << (token & 7)
        for one in banned:
            if len(one) == 1:
                _forbid(mask, one[0])
        self._mask = bytes(mask)

    def advance(self, tokens: Sequence[int]) -> "Future[tuple[list[int], bytes]]":
        """Computed directly, since it takes microseconds. Nothing is forced."""
        if self._reach:
            self._tail = [*self._tail, *tokens][-self._reach :]
        found: Future[tuple[list[int], bytes]] = Future()
        found.set_result(([], self._next()))
        return found

    def _next(self) -> bytes:
        ends = [one[-1] for one in self._banned if self._tail[-(len(one) - 1) :] == one[:-1]]
        if not ends:
            return self._mask
        mask = bytearray(self._mask)
        for token in ends:
            _forbid(mask, token)
        return bytes(mask)


def _forbid(mask: bytearray, token: int) -> None:
    mask[token >> 3] &= ~(1 << (token & 7))
