"""Ctrl-C at chosen moments."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import quire

SOURCES = str(Path(quire.__file__).parent)


@contextmanager
def interrupted(*after_lines: int) -> Iterator[None]:
    """Raises KeyboardInterrupt in this thread after so many lines of the package, then after so many more."""
    left = list(after_lines)
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(SOURCES) or not left:
            return None
        if event == "line":
            seen += 1
            if seen > left[0]:
                left.pop(0)
                seen = 0
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
