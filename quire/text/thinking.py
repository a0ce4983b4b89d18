"""Thinking sections: the reasoning that a model writes before its answer."""

from dataclasses import dataclass
from enum import Enum, auto

from quire.text.pieces import Reasoning


@dataclass(frozen=True)
class ThinkingFormat:
    """The marks around a thinking section, and those around the answer after it, if it has any."""

    begin: str
    end: str
    answer_begin: str = ""
    answer_end: str = ""
    parts: tuple[str, ...] = ()  # of the marks, where those are not tokens of their own

    @property
    def marks(self) -> tuple[str, ...]:
        return self.parts or tuple(mark for mark in (self.begin, self.end, self.answer_begin, self.answer_end) if mark)

    def is_open_at_end_of(self, prompt: str) -> bool:
        """True if the prompt ends inside a section, which its template has opened."""
        return prompt.rstrip().endswith(self.begin)

    def is_closed_at_end_of(self, prompt: str) -> bool:
        """True if the prompt ends with a section, so that the answer has none."""
        return prompt.rstrip().endswith(self.end)

    def is_open_in(self, message: str) -> bool:
        """True if an answer that continues `message` continues a section."""
        return message.rfind(self.begin) > message.rfind(self.end)


# The thinking of gpt-oss is a message on a channel; `quire/text/harmony.py` reads its answers.
HARMONY = ThinkingFormat(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    parts=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
)

# The more particular first.
FORMATS = (
    ThinkingFormat("<think>", "</think>", "<response>", "</response>"),  # Granite 3.3
    ThinkingFormat("<think>", "</think>"),
    ThinkingFormat("[THINK]", "[/THINK]"),  # Mistral
    ThinkingFormat("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    ThinkingFormat("<|channel>thought", "<channel|>"),  # Gemma 4
    ThinkingFormat("<seed:think>", "</seed:think>"),
    ThinkingFormat("<thought>", "</thought>"),
)


def thinking_of(template: str) -> ThinkingFormat | None:
    """The form in which the model of this template thinks; None where the template knows no thinking."""
    if HARMONY.begin in template:  # its end is that of other templates' messages
        return HARMONY
    return next((form for form in FORMATS if form.end in template and form.answer_end in template), None)


class _State(Enum):
    BEFORE = auto()  # whitespace, and possibly the start of the first mark
    THINKING = auto()
    AFTER = auto()  # whitespace after a section, and possibly the start of the mark before the answer
    ANSWER = auto()
    MARKED_ANSWER = auto()  # a mark comes after it


class ThinkingParser:
    """Splits an answer into a thinking section, which is only allowed at its start, and the rest.

    Whitespace at the edges of a section is dropped. Only whitespace and the start of a mark are held back.
    """

    def __init__(self, form: ThinkingFormat, *, begins_inside: bool) -> None:
        """`begins_inside`: the prompt has opened the section. A first mark that is repeated is left out."""
        self._form = form
        self._begins_inside = begins_inside
        self._state = _State.BEFORE
        self._held = ""  # a part of a mark
        self._blanks: list[str] = []  # before what is held
        self._has_begun = False  # some thinking has been emitted

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
            text = self._read_after(text)
        if self._state is _State.MARKED_ANSWER:
            text = self._read_marked(text)
        if self._state in (_State.ANSWER, _State.MARKED_ANSWER) and text:
            pieces.append(text)
        return pieces

    def flush(self) -> list[str | Reasoning]:
        """The text that was held back and cannot become a mark."""
        left, self._held = "".join(self._blanks) + self._held, ""
        is_answer = self._state not in (_State.BEFORE, _State.THINKING)
        if is_answer or (self._state is _State.BEFORE and not self._begins_inside):
            return [left] if left else []
        left = left.rstrip() if self._has_begun else left.strip()
        return [Reasoning(left)] if left else []

    def _read_before(self, text: str, pieces: list[str | Reasoning]) -> str:
        """Returns the text that follows the first mark, or was no mark."""
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
        """Returns the text that follows the last mark."""
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

    def _read_after(self, text: str) -> str:
        """The answer, without the whitespace and the mark before it."""
        text, self._held = (self._held + text).lstrip(), ""
        mark = self._form.answer_begin
        if mark and len(text) < len(mark) and mark.startswith(text):
            self._held = text
        elif mark and text.startswith(mark):
            self._state = _State.MARKED_ANSWER
            return text.removeprefix(mark)
        elif text:
            self._state = _State.ANSWER
        return "" if self._held else text

    def _read_marked(self, text: str) -> str:
        """The answer without the mark after it."""
        before, found, after = (self._held + text).partition(self._form.answer_end)
        self._held = ""
        if found:
            self._state = _State.ANSWER
            return before + after
        kept = mark_begun_at_end(before, self._form.answer_end)
        self._held = before[len(before) - kept :]
        return before[: len(before) - kept]


def mark_begun_at_end(text: str, mark: str, at: int = 0) -> int:
    """The number of characters at the end of `text`, from `at` on, that `mark` begins with, if not all of it."""
    end = text[max(at, len(text) - len(mark) + 1) :]
    if mark[0] not in end:
        return 0
    return next((size for size in range(len(end), 0, -1) if mark.startswith(end[-size:])), 0)
