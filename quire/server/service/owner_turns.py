"""A thread that owners use by turns."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Waiting(NamedTuple):
    work: Callable[[], Any]
    done: "asyncio.Future[Any]"


class OwnerTurns:
    """Runs work in one thread: of each owner in order, and of all owners by turns, so that one with much of it delays
    others by one piece for each of theirs. Owned by the event loop."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: dict[str, deque[_Waiting]] = {}  # the owner of the next turn first
        self._task: asyncio.Task[None] | None = None  # runs while there is any

    def num_waiting(self, owner: str) -> int:
        return len(self._waiting.get(owner, ()))

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """`work()`. Where this is cancelled before it has begun, it is left out."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(_Waiting(work, done))
        if self._task is None:
            self._task = asyncio.create_task(self._take_turns())
        return await done

    async def all_taken(self) -> None:
        """Wait until nothing is left to do."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _take_turns(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                owner = next(iter(self._waiting))
                waiting = self._waiting.pop(owner)
                work, done = waiting.popleft()
                if waiting:
                    self._waiting[owner] = waiting  # behind the others
                if done.done():
                    continue
                try:
                    result = await loop.run_in_executor(self._thread, work)
                except Exception as error:
                    if not done.done():
                        done.set_exception(error)
                else:
                    if not done.done():
                        done.set_result(result)
        finally:
            self._task = None
