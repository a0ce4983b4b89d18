"""Steps of an engine, one by one."""

import threading
import time
from collections.abc import Callable

from tests.patience import WAIT_S


class Gate:
    """Holds steps back: each needs a permit."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, *_: object) -> None:
        while not self._open.is_set() and not self._permits.acquire(timeout=0.01):
            pass

    def let(self, steps: int) -> None:
        self._permits.release(steps)

    def step_until(self, holds: Callable[[], bool]) -> None:
        """One step after the other: commands are taken in between."""
        until = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < until, "it did not come true in time"
            self.let(1)
            time.sleep(0.005)

    def open(self) -> None:
        self._open.set()
