"""Answers in harmony, the format of gpt-oss: messages, each on a channel and some of them to a function.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"key": "value"}<|call|>

A prompt ends with the beginning of the first message, `<|start|>assistant`.
"""

import re
from enum import Enum, auto

from quire.text.pieces import CallArguments, CallBegins, Piece, Reasoning
from quire.text.thinking import mark_begun_at_end

_MESSAGE, _START, _CHANNEL = "<|message|>", "<|start|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_FIND_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADER = re.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=(?P<first>[^\s<]+))?\s*"
    r"<\|channel\|>\s*(?P<channel>\w+)\s*(?:to=(?P<second>[^\s<]+))?\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
_HEADER_BEGINS = (*_ENDS, "assistant", "to=", _CHANNEL)
_LONGEST_HEADER = 512  # characters, with the mark after it; more is text


class MessageKind(Enum):
    THINKING = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyParser:
    """Cuts an answer into thinking, text and calls. Text that is in no message is text for the reader.

    What is held back is the header of a message, and a part of a mark.
    """

    def __init__(self, *, finds_calls: bool, begins_in: MessageKind | None = None) -> None:
        """`finds_calls`: there are functions to be called; otherwise messages to them are text. `begins_in`: the prompt
        has begun a message of this kind."""
        self._finds_calls = finds_calls
        self._kind = begins_in  # of the message; None: its header comes
        self._held = ""
        self._is_empty = True  # nothing of the message is out
        self._begun: set[MessageKind] = set()  # kinds of which something is out
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        return self._kind is MessageKind.THINKING

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        pieces: list[Piece] = []
        self._held, text = "", self._held + text
        while text:
            text = self._read_header(text, pieces) if self._kind is None else self._read_message(text, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """The text that was held back and cannot become a mark. A header that is not complete is left out."""
        pieces: list[Piece] = []
        text, self._held = self._held, ""
        if self._kind is None and not (_START in text or _CHANNEL in text):
            self._kind, self._is_empty = MessageKind.TEXT, True
        self._write(text if text.strip() or self._kind is not None else "", pieces)
        self._end(pieces)
        return pieces

    def _read_header(self, text: str, pieces: list[Piece]) -> str:
        """Returns what follows a header, or all of the text where it is none."""
        inner = text.lstrip()
        if (end := _FIND_END.match(inner)) is not None and end[0] != _START:
            return inner[end.end() :]
        header, found, rest = text[:_LONGEST_HEADER].partition(_MESSAGE)
        if found and (parts := _HEADER.fullmatch(header)) is not None:
            self._begin(parts, pieces)
            return rest + text[_LONGEST_HEADER:]
        may_begin = any(inner.startswith(begin) or begin.startswith(inner) for begin in _HEADER_BEGINS)
        if not found and may_begin and len(text) < _LONGEST_HEADER:
            self._held = text
            return ""
        self._kind, self._is_empty = MessageKind.TEXT, True
        if inner.startswith(_START):  # which would end it at once
            self._write(_START, pieces)
            return inner.removeprefix(_START)
        return text

    def _begin(self, header: re.Match[str], pieces: list[Piece]) -> None:
        recipient = header["second"] or header["first"] or ""
        name = recipient.removeprefix("functions.")
        self._is_empty = True
        if self._finds_calls and name and name != recipient:
            self._kind = MessageKind.CALL
            pieces.append(CallBegins(self.num_calls, name))
            self.num_calls += 1
        else:
            self._kind = MessageKind.THINKING if header["channel"] == "analysis" else MessageKind.TEXT

    def _read_message(self, text: str, pieces: list[Piece]) -> str:
        """Returns what follows the message."""
        found = _FIND_END.search(text)
        if found is None:
            kept = max(mark_begun_at_end(text, mark) for mark in _ENDS)
            self._held = text[len(text) - kept :]
            self._write(text[: len(text) - kept], pieces)
            return ""
        self._write(text[: found.start()], pieces)
        self._end(pieces)
        self._kind = None
        return text[found.start() if found[0] == _START else found.end() :]

    def _write(self, text: str, pieces: list[Piece]) -> None:
        if not text or self._kind is None:
            return
        if self._kind is MessageKind.CALL:
            pieces.append(CallArguments(self.num_calls - 1, text))
        else:
            # Messages of a kind are paragraphs.
            text = f"\n\n{text}" if self._is_empty and self._kind in self._begun else text
            self._begun.add(self._kind)
            pieces.append(Reasoning(text) if self._kind is MessageKind.THINKING else text)
        self._is_empty = False

    def _end(self, pieces: list[Piece]) -> None:
        if self._kind is MessageKind.CALL and self._is_empty:
            pieces.append(CallArguments(self.num_calls - 1, "{}"))
            self._is_empty = False
