"""Finds the calls in an answer while it comes."""

import json
import re
from enum import Enum, auto

from quire.text.pieces import Arguments, CallBegins, Piece
from quire.text.thinking import mark_begun_at_end
from quire.text.tools import CallFormat


class _State(Enum):
    TEXT = auto()  # until calls begin
    NO_CALLS = auto()  # text to the end
    OPENING = auto()  # before the arguments of a call
    ARGUMENTS = auto()
    AFTER = auto()  # a call


class CallParser:
    """Cuts an answer into text and calls. The answer follows the grammar of the calls' format, or ends early."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._opening = re.compile(rf'\{{"name": ("(?:[^"\\]|\\.)*"), "{form.arguments}": ')
        self._state = _State.TEXT
        self._held = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The text that was held back and cannot become a call any more."""
        left, self._held = self._held, ""
        return [left] if left and self._state in (_State.TEXT, _State.NO_CALLS) else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take one step through what is held; False when more must come first."""
        if self._state is _State.TEXT:
            return self._read_text(pieces)
        if self._state is _State.NO_CALLS:
            if self._held:
                pieces.append(self._held)
            self._held = ""
            return False
        if self._state is _State.OPENING:
            return self._read_opening(pieces)
        if self._state is _State.ARGUMENTS:
            return self._read_arguments(pieces)
        between = self._form.between
        if between is None or not self._held.startswith(between):
            return False
        self._held = self._held[len(between) :]
        self._state = _State.OPENING
        return True

    def _read_text(self, pieces: list[Piece]) -> bool:
        begin = self._form.begin
        if not begin:  # the first character tells
            if self._held:
                self._state = _State.OPENING if self._held[0] == "{" else _State.NO_CALLS
            return bool(self._held)
        before, found, after = self._held.partition(begin)
        if found:
            self._held = after
            self._state = _State.OPENING
        else:
            kept = mark_begun_at_end(before, begin)
            before, self._held = before[: len(before) - kept], before[len(before) - kept :]
        if before:
            pieces.append(before)
        return bool(found)

    def _read_opening(self, pieces: list[Piece]) -> bool:
        match = self._opening.match(self._held)
        if match is None:
            return False
        pieces.append(CallBegins(self.num_calls, json.loads(match[1])))
        self.num_calls += 1
        self._held = self._held[match.end() :]
        self._state = _State.ARGUMENTS
        self._depth = 0
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        """Up to the brace that closes the call, which the arguments have not opened."""
        end = None
        for at, char in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if not self._depth:
                    end = at
                    break
                self._depth -= 1
        text = self._held[:end]
        if text:
            pieces.append(Arguments(self.num_calls - 1, text))
        self._held = "" if end is None else self._held[end + 1 :]
        if end is not None:
            self._state = _State.AFTER
        return end is not None
