"""Requests begin by turns."""

import asyncio
from collections import deque

MAX_PER_TURN = 8  # a request costs about a millisecond until it is with the engine


class ArrivalTurns:
    """Lets a few requests begin in each turn of the event loop, in the order they came.

    What costs less goes between them: a step's tokens, health checks, scrapes. Without this they would wait for the
    whole of a burst. Owned by the event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_begun = 0  # in this turn

    async def take(self) -> None:
        """Wait until a request may begin."""
        loop = asyncio.get_running_loop()
        if self._num_begun == MAX_PER_TURN:  # others wait only then
            mine = loop.create_future()
            self._waiting.append(mine)
            await mine
            return
        if not self._num_begun:
            loop.call_soon(self._next_turn)
        self._num_begun += 1

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MAX_PER_TURN:
            first = self._waiting.popleft()
            if not first.done():  # else it was cancelled
                first.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
