"""Thinking sections: the text that a model writes for itself before its answer."""

from dataclasses import dataclass
from enum import Enum, auto

from quire.text.pieces import Reasoning


@dataclass(frozen=True)
class ThinkingFormat:
    """The marks around a thinking section."""

    begin: str
    end: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end

    def is_open_at_end_of(self, prompt: str) -> bool:
        """True if the prompt ends inside a section, which its template has opened."""
        return prompt.rstrip().endswith(self.begin)

    def is_closed_at_end_of(self, prompt: str) -> bool:
        """True if the prompt ends with a section, so that the answer has none."""
        return prompt.rstrip().endswith(self.end)

    def is_open_in(self, message: str) -> bool:
        """True if an answer that continues `message` continues a section."""
        return message.rfind(self.begin) > message.rfind(self.end)


FORMATS = (
    ThinkingFormat("<think>", "</think>"),
    ThinkingFormat("[THINK]", "[/THINK]"),
    ThinkingFormat("<seed:think>", "</seed:think>"),
    ThinkingFormat("<thought>", "</thought>"),
)


def thinking_of(template: str) -> ThinkingFormat | None:
    """The form in which the model of this template thinks; None where the template knows no thinking."""
    return next((form for form in FORMATS if form.end in template), None)


class _State(Enum):
    BEFORE = auto()  # blanks and a part of the first mark, perhaps
    THINKING = auto()
    AFTER = auto()  # blanks that follow a section
    ANSWER = auto()


class ThinkingParser:
    """Cuts an answer into a thinking section, which can stand at its beginning alone, and the rest.

    Blanks at the edges of a section belong to its form. What is held back is a part of a mark, and blanks.
    """

    def __init__(self, form: ThinkingFormat, *, begins_inside: bool) -> None:
        """`begins_inside`: the prompt has opened the section. A first mark that is repeated is left out."""
        self._form = form
        self._begins_inside = begins_inside
        self._state = _State.BEFORE
        self._held = ""  # a part of a mark
        self._blanks: list[str] = []  # before what is held
        self._has_begun = False  # some thinking is out

    @property
    def is_thinking(self) -> bool:
        return self._state is _State.THINKING or (self._state is _State.BEFORE and self._begins_inside)

    def push(self, text: str) -> list[str | Reasoning]:
        """The pieces that `text` completes."""
        pieces: list[str | Reasoning] = []
        if self._state is _State.BEFORE:
            text = self._read_before(text, pieces)
        if self._state is _State.THINKING:
            text = self._read_thinking(text, pieces)
        if self._state is _State.AFTER:
            text = text.lstrip()
            if text:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER and text:
            pieces.append(text)
        return pieces

    def flush(self) -> list[str | Reasoning]:
        """What was held back and cannot become a mark any more."""
        left, self._held = "".join(self._blanks) + self._held, ""
        if self._state is _State.BEFORE and not self._begins_inside:
            return [left] if left else []
        left = left.rstrip() if self._has_begun else left.strip()
        return [Reasoning(left)] if left else []

    def _read_before(self, text: str, pieces: list[str | Reasoning]) -> str:
        """What follows the first mark, or was no mark."""
        if not self._held:
            inner = text.lstrip()
            self._blanks.append(text[: len(text) - len(inner)])
            text = inner
        text = self._held + text
        self._held = ""
        begin = self._form.begin
        if len(text) < len(begin) and begin.startswith(text):
            self._held = text
            return ""
        if text.startswith(begin) or self._begins_inside:
            self._state = _State.THINKING
            self._blanks = []
            return text.removeprefix(begin)
        self._state = _State.ANSWER
        blanks, self._blanks = "".join(self._blanks), []
        return blanks + text

    def _read_thinking(self, text: str, pieces: list[str | Reasoning]) -> str:
        """What follows the last mark."""
        before, found, after = (self._held + text).partition(self._form.end)
        self._held = ""
        if not found:
            kept = mark_begun_at_end(before, self._form.end)
            before, self._held = before[: len(before) - kept], before[len(before) - kept :]
        body = before.rstrip()
        if body:
            shown = "".join(self._blanks) + body
            pieces.append(Reasoning(shown if self._has_begun else shown.lstrip()))
            self._has_begun = True
            self._blanks = []
        self._blanks.append(before[len(body) :])
        if found:
            self._blanks = []
            self._state = _State.AFTER
        return after


def mark_begun_at_end(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that `mark` begins with, if not all of it."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
