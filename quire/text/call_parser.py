"""Finds the calls in an answer while it streams."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from quire.text.call_readers import reader_of
from quire.text.call_scanner import Malformed, Reads, Scanner
from quire.text.pieces import CallArguments, CallBegins, Piece
from quire.text.thinking import mark_begun_at_end
from quire.text.tools import CallFormat

_BLANKS = re.compile(r"[ \n\r\t]*")
_BLANKS_BETWEEN_CALLS = re.compile(r"[ \n\r\t;]*")


class CallParser:
    """Cuts an answer into text and calls. What turns out not to be a call is text.

    An answer that follows the grammar of its calls is `guided`, and arguments come out as they are read. Of others a
    call comes out when it is complete.
    """

    def __init__(
        self, form: CallFormat, tools: Mapping[str, Mapping[str, Any]] | None = None, *, guided: bool = True
    ) -> None:
        """`tools`: the schemas of functions by their names. Calls without a mark are calls of these."""
        self._form = form
        self._tools = tools
        self._guided = guided
        self._marks = re.compile("|".join(map(re.escape, form.first_marks)) or "(?!)")
        self._may_begin = re.compile("|".join({re.escape(mark[0]) for mark in form.first_marks}) or "(?!)").search
        self._may_be_bare = bool(form.bare)
        self._skips_blanks = self._may_be_bare  # at the beginning of bare calls, and after calls
        self._held = ""  # possibly the start of a mark
        self._blanks: list[str] = []  # before what is held
        self._reader: Reads[None] | None = None
        self._scanner = Scanner()
        self._raw: list[str] = []  # what the reader has read since the last call
        self._is_between = False  # the reader is between calls
        self._is_begun = False  # it reads arguments
        self._is_out = False  # part of the current call has been emitted
        self._pending: list[Piece] = []  # of the call that it reads
        self._pieces: list[Piece] = []  # that are complete
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._held, text = "", self._held + text
        at = 0
        while at < len(text):
            at = self._search(text, at) if self._reader is None else self._read(text, at)
        if self._guided:
            self._let_out()
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> list[Piece]:
        """The text that was held back and cannot become a call."""
        if self._reader is not None:
            self._end_reading()
        if self._held or not self.num_calls:
            self._write_text("".join(self._blanks) + self._held)
        self._held, self._blanks = "", []
        pieces, self._pieces = self._pieces, []
        return pieces

    # Readers call these.

    def start(self) -> None:
        self._is_between = False

    def check(self, name: str) -> None:
        if self._form.bare and self._tools is not None and name not in self._tools:
            raise Malformed

    def begin(self, name: str) -> None:
        self._is_begun = True
        self._pending.append(CallBegins(self.num_calls, name))

    def complete(self) -> None:
        self._let_out()
        self._is_begun = self._is_out = False
        self._is_between = True
        self._raw = []

    def schema(self, name: str) -> Mapping[str, Any]:
        return (self._tools or {}).get(name, {})

    def _let_out(self) -> None:
        """Emit the known part of the current call."""
        if not self._is_begun:
            return
        if not self._is_out:
            self.num_calls += 1
            self._is_out = True
        arguments = "".join(self._scanner.out)
        self._scanner.out.clear()
        self._pieces += self._pending
        self._pending = []
        if arguments:
            self._pieces.append(CallArguments(self.num_calls - 1, arguments))

    def _write_text(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _search(self, text: str, at: int) -> int:
        """Look for calls. Returns where a reader must read, or the end."""
        if not (self._skips_blanks or self._may_begin(text, at)):  # most text takes this way
            self._pieces.append(text[at:])
            return len(text)
        if self._skips_blanks:
            begin, at = at, self._after_blanks(text, at)
            self._blanks.append(text[begin:at])
            if self._may_be_bare and text[at : at + 1] and text[at] in self._form.bare:
                return self._begin_reading("", at)
        found = self._marks.search(text, at)
        if found is not None:
            self._write_before_mark(text[at : found.start()])
            return self._begin_reading(found[0], found.end())
        kept = max((mark_begun_at_end(text, mark, at) for mark in self._form.first_marks), default=0)
        shown, self._held = text[at : len(text) - kept], text[len(text) - kept :]
        if shown:
            self._write_before_mark(shown)
            self._may_be_bare = self._skips_blanks = False
        return len(text)

    def _after_blanks(self, text: str, at: int) -> int:
        blanks = _BLANKS_BETWEEN_CALLS if self._may_be_bare and self.num_calls else _BLANKS
        found = blanks.match(text, at)
        return at if found is None else found.end()

    def _write_before_mark(self, text: str) -> None:
        """Drop whitespace between calls."""
        if text or not self.num_calls:
            self._write_text("".join(self._blanks) + text)
        self._blanks = []

    def _begin_reading(self, mark: str, at: int) -> int:
        self._raw = [*self._blanks, mark]
        self._blanks = []
        self._is_between = False
        self._scanner, self._reader = reader_of(self._form, self, mark)
        next(self._reader)
        return at

    def _read(self, text: str, at: int) -> int:
        """Give characters to the reader. Returns where it leaves the others."""
        assert self._reader is not None
        send = self._reader.send
        for here in range(at, len(text)):
            char = text[here]
            try:
                self._raw.append(char)
                send(char)
            except StopIteration:
                left = here + 1 - len(self._scanner.unread())
                self._stop_reading(found=True)
                return left
            except Malformed:
                self._raw.pop()
                self._give_up()
                return here
        return len(text)

    def _end_reading(self) -> None:
        """The answer ends within a call, or after one."""
        assert self._reader is not None
        with contextlib.suppress(StopIteration, Malformed):
            self._reader.send("")
        if self._is_between:
            self._raw = []
        self._give_up()

    def _give_up(self) -> None:
        """Treat the text that was read as text: it is not a call, or not the rest of one."""
        if self._guided:
            self._let_out()
        raw = "" if self._is_out else "".join(self._raw)
        self._stop_reading(found=bool(self.num_calls) and not raw)
        self._write_text(raw)
        self._may_be_bare = False

    def _stop_reading(self, *, found: bool) -> None:
        self._reader = None
        self._raw, self._pending = [], []
        self._is_begun = self._is_out = False
        self._skips_blanks = found
        self._may_be_bare = bool(self._form.bare)  # one call may follow another
