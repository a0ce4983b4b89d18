"""Measures how long an event loop computes before it looks at its sockets again."""

import asyncio
import selectors
import time


class MeasuringSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Measures the processor time of the thread from one look at the sockets to the next.

    That is how long a request that has just come waits because of others. Time in which the thread does not run, since
    the machine is busy or another thread holds the interpreter, does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._since_s: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._since_s is not None:
            self.longest_s = max(self.longest_s, time.thread_time() - self._since_s)
        found = super().select(timeout)
        self._since_s = time.thread_time()
        return found


class MeasuredLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = MeasuringSelector()
        super().__init__(self.selector)

    def take_longest_s(self) -> float:
        """The longest stretch since the last call."""
        longest_s, self.selector.longest_s = self.selector.longest_s, 0.0
        return longest_s
