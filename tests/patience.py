"""Time limits of tests."""

import time
from collections.abc import Callable

# For something that comes: what works comes sooner on any machine, however busy, and then the wait is over.
WAIT_S = 300.0


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.02)
