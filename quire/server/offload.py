"""Work whose cost grows with a request, kept off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.errors import Overloaded

T = TypeVar("T")

LARGE_BYTES = 8192  # smaller requests are done sooner than handed to a thread
# One thread has the interpreter at a time, so the loop keeps a third of it at least. Tokenising runs without it.
NUM_THREADS = 2
MAX_WAITING = 256
RETRY_S = 1.0


class Offload:
    """Parses large requests and writes large answers in threads, so that the other streams go on meanwhile.

    Owned by the event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-offload")
        self._num_waiting = 0

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """`work()`, in a thread when it is about `LARGE_BYTES` or more."""
        if num_bytes < LARGE_BYTES:
            return work()
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} large requests are in work; the limit is {MAX_WAITING}", RETRY_S)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= 1
