"""Answers on a terminal."""

import io
import sys

import pytest

from quire.cli.answer_printer import AnswerPrinter
from quire.llm.completion import Delta


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def delta(text: str, reasoning: str = "") -> Delta:
    return Delta(0, 0, text, [], None, None, 0, 0, 0, None, reasoning)


@pytest.mark.parametrize(
    ("out", "printed"), [(Terminal(), "\x1b[2mhm\x1b[0m\x1b[2m so\x1b[0m\n\nTwo."), (io.StringIO(), "Two.")]
)
def test_thinking_is_shown_on_terminals_alone(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, printed: str) -> None:
    monkeypatch.setattr(sys, "stdout", out)
    printer = AnswerPrinter()
    for one in (delta("", "hm"), delta("", " so"), delta("T"), delta("wo.")):
        printer.print(one)
    assert out.getvalue() == printed
