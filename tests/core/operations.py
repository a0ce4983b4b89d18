"""Counts what Python does: bounds of algorithms are tested by it, not by the clock."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(function: Callable[[], object]) -> int:
    """The instructions that Python executes in `function` and in all that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # it calls others at any moment
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts nothing unless a frame has asked before
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count
