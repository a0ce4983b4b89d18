"""Answers in harmony, the format of gpt-oss: messages, each on a channel and some of them to a function.

    <|channel|>analysis<|message|>thinking<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"key": "value"}<|call|>

A prompt ends with the beginning of the first message, `<|start|>assistant`.
"""

import re
from enum import Enum, auto
from typing import NamedTuple

from quire.text.pieces import CallArguments, CallBegins, Piece, Reasoning
from quire.text.thinking import mark_begun_at_end

_MESSAGE, _START, _CHANNEL, _CONSTRAIN = "<|message|>", "<|start|>", "<|channel|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_FIND_END = re.compile("|".join(map(re.escape, _ENDS)))
_TO = "to="
_HEADER_BEGINS = (*_ENDS, "assistant", _TO, _CHANNEL)
_LONGEST_HEADER = 512  # characters, with the mark after it; more is text


class MessageKind(Enum):
    THINKING = auto()
    TEXT = auto()
    CALL = auto()


class _Header(NamedTuple):
    channel: str
    recipient: str  # may be empty

    @classmethod
    def of(cls, text: str) -> "_Header | None":
        """The header that `text`, without the mark after it, is; None if it is none."""
        role, found, rest = text.partition(_CHANNEL)
        rest, _, kind = rest.partition(_CONSTRAIN)
        first = role.strip().removeprefix(_START).lstrip().removeprefix("assistant").lstrip()
        channel, *words = rest.split() or [""]
        second = words.pop(0) if words and words[0].startswith(_TO) else ""
        kinds = [*words, *kind.split()]
        if not (found and len(kinds) <= 1 and all(map(_is_word, (channel, *kinds)))):
            return None
        if not all(_is_recipient(one) for one in (first, second) if one):
            return None
        return cls(channel, (second or first).removeprefix(_TO))


def _is_word(text: str) -> bool:
    return text.replace("_", "a").isalnum()


def _is_recipient(text: str) -> bool:
    return text.startswith(_TO) and text != _TO and "<" not in text and len(text.split()) == 1


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
        at = 0
        while at < len(text):
            at = self._read_header(text, at, pieces) if self._kind is None else self._read_message(text, at, pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """The text that was held back and cannot become a mark. A header that is not complete is left out."""
        pieces: list[Piece] = []
        text, self._held = self._held, ""
        if self._kind is None and not text.strip():  # between messages, or after the last
            return pieces
        if self._kind is None and not (_START in text or _CHANNEL in text):
            self._kind, self._is_empty = MessageKind.TEXT, True
        self._write(text, pieces)
        self._end(pieces)
        return pieces

    def _read_header(self, text: str, at: int, pieces: list[Piece]) -> int:
        """The position after the header at `at`; `at` itself where there is none and a message begins."""
        seen = text[at : at + _LONGEST_HEADER]
        inner = seen.lstrip()
        inner_at = at + len(seen) - len(inner)
        if (end := _FIND_END.match(inner)) is not None and end[0] != _START:
            return inner_at + end.end()
        before, found, _ = seen.partition(_MESSAGE)
        if found and (header := _Header.of(before)) is not None:
            self._begin(header, pieces)
            return at + len(before) + len(_MESSAGE)
        may_begin = any(inner.startswith(begin) or begin.startswith(inner) for begin in _HEADER_BEGINS)
        if not found and may_begin and len(seen) < _LONGEST_HEADER:
            self._held = seen
            return len(text)
        self._kind, self._is_empty = MessageKind.TEXT, True
        if inner.startswith(_START):  # which would end it at once
            self._write(_START, pieces)
            return inner_at + len(_START)
        return at

    def _begin(self, header: _Header, pieces: list[Piece]) -> None:
        name = header.recipient.removeprefix("functions.")
        self._is_empty = True
        if self._finds_calls and name and name != header.recipient:
            self._kind = MessageKind.CALL
            pieces.append(CallBegins(self.num_calls, name))
            self.num_calls += 1
        else:
            self._kind = MessageKind.THINKING if header.channel == "analysis" else MessageKind.TEXT

    def _read_message(self, text: str, at: int, pieces: list[Piece]) -> int:
        """The position after the message, or what there is of it."""
        found = _FIND_END.search(text, at)
        if found is None:
            kept = max(mark_begun_at_end(text, mark, at) for mark in _ENDS)
            self._held = text[len(text) - kept :]
            self._write(text[at : len(text) - kept], pieces)
            return len(text)
        self._write(text[at : found.start()], pieces)
        self._end(pieces)
        self._kind = None
        return found.start() if found[0] == _START else found.end()

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
