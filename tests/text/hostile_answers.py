"""Answers that are made to be hard to read, for every form of answers there is, and the work that reading one takes."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from quire.text import tools
from quire.text.answer_parts import AnswerForm
from quire.text.thinking import FORMATS, HARMONY
from quire.text.tools import HARMONY_CALLS, CallFormat

CALL_FORMATS: dict[str, CallFormat] = {
    name: form for name, form in vars(tools).items() if isinstance(form, CallFormat) and name.isupper()
}
SCHEMA = {
    "properties": {
        "a": {"type": "string"},
        "ab c": {},
        "n": {"type": ["integer", "null"]},
        **{f"k{number}": {} for number in range(50)},
    }
}
TOOLS: dict[str, dict[str, Any]] = {"f": SCHEMA, "run": {}}


def forms() -> Iterator[tuple[str, AnswerForm]]:
    """Every format of calls, guided and not, and every format of thinking."""
    for number, (name, calls) in enumerate(CALL_FORMATS.items()):
        thinking = HARMONY if calls is HARMONY_CALLS else [None, *FORMATS][number % (1 + len(FORMATS))]
        for guided in (True, False):
            yield (
                f"{name}, {'guided' if guided else 'free'}",
                AnswerForm(thinking, calls, False, TOOLS, guided, frozenset({"run"})),
            )
    for thinking in FORMATS:
        yield thinking.end, AnswerForm(thinking, None, begins_in_thinking=True)


FORMS = dict(forms())


def begins(form: AnswerForm) -> list[str]:
    """Texts after which a reader is at each of the places that it can be at."""
    found = ["", *(f"{mark}" for mark in form.marks)]
    if form.thinking is not None and form.thinking is not HARMONY:
        found += [form.thinking.begin, form.thinking.begin + form.thinking.end]
    calls = form.calls
    if calls is None:
        return found
    if calls is HARMONY_CALLS:
        for name in ("f", "run"):
            header = f"<|channel|>commentary to=functions.{name} <|message|>"
            found += [header, header + '{"input": "', header + '{"', header + "{"]
        return found
    begin = calls.begin or calls.bare
    marked = calls.quote
    found += [begin, begin.rstrip("[")]
    for name in ("f", "run"):
        for call in (
            f'{{"name": "{name}", "arguments": ',
            f'{{"name": "{name}", "parameters": ',
            f"{name}[ARGS]",
            f"function{tools.SEPARATOR}{name}\n```json\n",
            f"{name}{tools.SEPARATOR}",
            f"<function={name}>\n<parameter=a>\n",
            f"{name}\n<arg_key>a</arg_key>\n<arg_value>",
            f"{name}(a=",
            f"call:{name}",
        ):
            found += [begin + call, f"{begin}{call}{{a:{marked}", f'{begin}{call}{{"a": "', f"{begin}{call}'"]
    return found


UNITS = [
    " ", "\n", "x", "é", "\U0001f600", "\0", "<", "<|", "{", "[", "(", '{"a":', "[{", '"', "'", "\\", "\\\\", '\\"',
    "\\u", "\\ud83d", "\\ud83d\\ude00", "\\x4", ",", ";", ":", "1", "-1e", "}", "]", "))", '"a": 1, ', "a=1, ",
    "true", "NaN", "```", '{"function": ', '{"name": "f", "arguments": {}}', "f(),", '"b": [], ', "assistant ", "to=",
    '{"a": NaN}', '{"a": 1}',
]  # fmt: skip


def units(form: AnswerForm) -> list[str]:
    """Texts that are repeated: those that many readers stumble over, marks, and marks that are cut."""
    marks = [mark for mark in form.marks if mark]
    cut = [part for mark in marks for part in (mark[:-1], mark[1:])]
    calls = form.calls
    whole = [] if calls is None else [f"{mark} " for mark in calls.first_marks]
    whole += ["<parameter=a>x</parameter>", "<arg_key>n</arg_key><arg_value>{</arg_value>"]
    return list(dict.fromkeys([*UNITS, *marks, *cut, *whole]))


def cut_at(text: str, places: Iterable[int]) -> list[str]:
    at = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(at)]


class Counted(str):
    """A text that adds the characters that are copied or looked through to `read`."""

    __slots__ = ()
    read = 0


def _counted(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def method(self: str, *args: Any) -> Any:
        found = plain(self, *args)
        size = len(found) if isinstance(found, str) else len(self) - (args[1] if len(args) > 1 else 0)
        if name not in ("__getitem__", "__add__"):
            size = max(size, len(self))
        Counted.read += size
        if isinstance(found, tuple):
            return tuple(map(Counted, found))
        return Counted(found) if isinstance(found, str) else found

    return method


for _name in (
    "__getitem__", "__add__", "partition", "rpartition", "strip", "lstrip", "rstrip", "find", "removeprefix",
    "removesuffix", "replace", "isspace",
):  # fmt: skip
    setattr(Counted, _name, _counted(_name))


def _reflected(self: str, other: str) -> Counted:
    Counted.read += len(other) + len(self)
    return Counted(str.__add__(other, self))


Counted.__radd__ = _reflected  # type: ignore[attr-defined]


class Work:
    """Counts lines of Python that run, and characters that are copied or looked through by texts that are `Counted`."""

    def __init__(self) -> None:
        self._num_lines = 0

    def __enter__(self) -> "Work":
        self._before = sys.gettrace()
        self._read = Counted.read
        sys.settrace(self._trace)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.settrace(self._before)

    @property
    def amount(self) -> int:
        return self._num_lines + (Counted.read - self._read) // 8  # a line takes as long as copying some characters

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_globals is globals():  # of what counts
            return None
        self._num_lines += 1
        return self._trace
