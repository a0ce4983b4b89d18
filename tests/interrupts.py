"""Ctrl-C and pauses at chosen lines."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import quire
from tests.patience import WAIT_S

SOURCES = str(Path(quire.__file__).parent)


@contextmanager
def _at_each_line(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` before each line of the package that this thread runs."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def interrupted(*after_lines: int) -> Iterator[None]:
    """Raises KeyboardInterrupt in this thread after so many lines of the package, then after so many more."""
    left = list(after_lines)
    seen = 0

    def interrupt() -> None:
        nonlocal seen
        seen += 1
        if left and seen > left[0]:
            left.pop(0)
            seen = 0
            raise KeyboardInterrupt

    with _at_each_line(interrupt):
        yield


@contextmanager
def paused(after_lines: int, is_there: threading.Event, may_go_on: threading.Event) -> Iterator[None]:
    """Stops this thread once, after so many lines of the package: sets one event and waits for the other."""
    seen = 0

    def pause() -> None:
        nonlocal seen
        if seen == after_lines:
            is_there.set()
            assert may_go_on.wait(WAIT_S)
        seen += 1

    with _at_each_line(pause):
        yield
