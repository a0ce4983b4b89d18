"""Splits an answer into thinking, text and calls while it streams."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.text.call_parser import CallParser
from quire.text.custom_input import InputText
from quire.text.harmony import HarmonyParser, MessageKind
from quire.text.pieces import CallArguments, CallBegins, Piece, Reasoning
from quire.text.thinking import HARMONY, ThinkingFormat, ThinkingParser
from quire.text.tools import CallFormat, CallStyle

__all__ = ["PLAIN", "AnswerForm", "AnswerParser", "CallArguments", "CallBegins", "Piece", "Reasoning"]


@dataclass(frozen=True)
class AnswerForm:
    """The parts that an answer may have."""

    thinking: ThinkingFormat | None = None
    calls: CallFormat | None = None
    begins_in_thinking: bool = False  # the prompt has opened the thinking section
    tools: Mapping[str, Mapping[str, Any]] | None = None  # the schemas of the functions that may be called, by name
    guided: bool = True  # the answer follows the grammar of its calls
    custom: frozenset[str] = frozenset()  # names of custom tools, which take an input instead of arguments

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of its formats, each of which may be a single token."""
        return (*(self.thinking.marks if self.thinking else ()), *(self.calls.marks if self.calls else ()))

    @property
    def is_plain(self) -> bool:
        """True if an answer is text and nothing else."""
        return self.thinking is None and self.calls is None


PLAIN = AnswerForm()


class AnswerParser:
    """Cuts one sample into pieces.

    It takes any text: nothing is raised, the joined pieces do not depend on how the text is split, and the work is
    linear in the text. A push costs as much as its own text, and as what was held back and comes out with it.
    """

    def __init__(self, form: AnswerForm) -> None:
        thinking = form.thinking
        self._harmony = _harmony_parser(form)
        self._thinking = self._calls = None
        if self._harmony is None and thinking is not None:
            self._thinking = ThinkingParser(thinking, begins_inside=form.begins_in_thinking)
        if self._harmony is None and form.calls is not None:
            self._calls = CallParser(form.calls, form.tools, guided=form.guided)
        self._custom = form.custom
        self._input: tuple[int, InputText] | None = None  # of the last call, with its number, if its tool is custom

    @property
    def num_calls(self) -> int:
        parser = self._calls or self._harmony
        return 0 if parser is None else parser.num_calls

    @property
    def is_thinking(self) -> bool:
        """True if the text so far ends within a thinking section."""
        parser = self._thinking or self._harmony
        return parser is not None and parser.is_thinking

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        if self._harmony is not None:
            return self._with_inputs(self._harmony.push(text))
        if self._thinking is None:
            return self._push_calls(text)
        return self._beyond_thinking(self._thinking.push(text))

    def flush(self) -> list[Piece]:
        """The remaining pieces, at the end of the text."""
        if self._harmony is not None:
            pieces = self._with_inputs(self._harmony.flush())
        else:
            pieces = [] if self._thinking is None else self._beyond_thinking(self._thinking.flush())
            pieces += [] if self._calls is None else self._with_inputs(self._calls.flush())
        self._end_input(pieces)
        return pieces

    def _beyond_thinking(self, parts: list[str | Reasoning]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in parts:
            pieces += self._push_calls(part) if isinstance(part, str) else [part]
        return pieces

    def _push_calls(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._with_inputs(self._calls.push(text))
        return [text] if text else []

    def _with_inputs(self, pieces: list[Piece]) -> list[Piece]:
        """The calls of custom tools with their inputs in place of arguments."""
        if not self._custom:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, CallArguments):
                self._end_input(found)
            if isinstance(piece, CallBegins) and piece.name in self._custom:
                self._input = piece.number, InputText()
            if isinstance(piece, CallArguments) and self._input is not None:
                piece = CallArguments(piece.number, self._input[1].push(piece.text))
                if not piece.text:
                    continue
            found.append(piece)
        return found

    def _end_input(self, pieces: list[Piece]) -> None:
        """Add the rest of the last call's input, which was held back."""
        if self._input is not None:
            number, text = self._input
            if rest := text.flush():
                pieces.append(CallArguments(number, rest))
            self._input = None


def _harmony_parser(form: AnswerForm) -> HarmonyParser | None:
    """The parser of an answer on channels. Without thinking, the prompt has begun a message for the reader."""
    finds_calls = form.calls is not None and form.calls.style is CallStyle.CHANNELS
    if form.thinking is not HARMONY and not finds_calls:
        return None
    begins_in = MessageKind.TEXT if form.thinking is None else None
    return HarmonyParser(
        finds_calls=finds_calls, begins_in=MessageKind.THINKING if form.begins_in_thinking else begins_in
    )
