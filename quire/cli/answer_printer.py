"""Prints answers while they stream."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.llm.completion import Delta  # imports the engine

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class AnswerPrinter:
    """Prints one answer. On a terminal its thinking is shown above it, dimmed."""

    def __init__(self) -> None:
        self._shows_thinking = sys.stdout.isatty()
        self._is_thinking = False

    def print(self, delta: "Delta") -> None:
        if self._shows_thinking and delta.reasoning:
            self._is_thinking = True
            print(f"{_DIM}{delta.reasoning}{_PLAIN}", end="", flush=True)
        if delta.text:
            before, self._is_thinking = "\n\n" if self._is_thinking else "", False
            print(before + delta.text, end="", flush=True)
