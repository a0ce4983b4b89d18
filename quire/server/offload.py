"""Runs work in threads when its cost grows with the size of a request."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.errors import Overloaded

T = TypeVar("T")

LARGE_BYTES = 8192  # smaller work costs less than handing it to a thread
# With two threads the event loop keeps a third of the interpreter lock at least. Tokenising releases it.
NUM_THREADS = 2
MAX_WAITING = 256
RETRY_S = 1.0


class Offload:
    """Parses large requests and writes large answers in threads, while other streams go on. Owned by the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "quire-offload")
        self._num_waiting = 0

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """`work()`, in a thread where `num_bytes` is large."""
        if num_bytes < LARGE_BYTES:
            return work()
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} large requests are in progress; the limit is {MAX_WAITING}", RETRY_S)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= 1
