"""Measures how long an event loop computes before it looks at its sockets again."""

import asyncio
import gc
import selectors
import threading
import time


class MeasuringSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Measures the processor time of the thread from one look at the sockets to the next.

    That is how long a request that has just come waits because of others. Time in which the thread does not run, since
    the machine is busy or another thread holds the interpreter, does not count. Nor do collections of garbage, which
    take as long as tests before have left objects.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._since_s: float | None = None
        self._thread = 0
        self._collecting_since_s = 0.0
        gc.callbacks.append(self._on_collection)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, time.thread_time() - self._since_s)
        found = super().select(timeout)
        self._since_s = time.thread_time()
        self._thread = threading.get_ident()
        return found

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Called on the thread that collects."""
        if self._since_s is None or threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_since_s = time.thread_time()
        else:
            self._since_s += time.thread_time() - self._collecting_since_s

    def close(self) -> None:
        gc.callbacks.remove(self._on_collection)
        super().close()


class MeasuredLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = MeasuringSelector()
        super().__init__(self.selector)

    def take_longest_s(self) -> float:
        """The longest stretch since the last call."""
        longest_s, self.selector.longest_s = self.selector.longest_s, 0.0
        return longest_s
