"""Bounds the work of one rendering of a chat template."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any

import jinja2

STEP = 250  # characters that one turn of a loop or one call counts for
_NODE = 10  # characters that a number or a container counts for, besides what it holds
_MAX_WIDTH = 10_000  # of padding and indentation
_MAX_DIGITS = 4  # of a width or precision in a format
_MAX_INTEGER_BITS = 4096
_SECONDS = 10.0

_NUMBER = re.compile(r"\d+")
_TAKE_WIDTHS = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson")
)
# Filters and methods of Jinja's that read a text again for each word, tag or bracket in it.
_QUADRATIC = frozenset(("striptags", "urlize", "wordwrap", "pprint"))


class OutOfBudget(jinja2.TemplateRuntimeError):
    """A rendering would do more work, or make a larger value, than it may."""


class Budget:
    """The work left to one rendering, in characters handled. Owned by that rendering.

    Whatever repeats or grows is paid for before it is done: no value a template makes is larger than `max_size`
    characters when written out, all of them together cost at most `limit`, and the clock stops what is slow for any
    other reason.
    """

    def __init__(self, input_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = 20_000_000 + 1000 * input_size
        self.max_size = 5_000_000 + 20 * input_size
        self._left = self.limit
        # By identity, for as long as the rendering lasts: templates cannot change a list or dict once it is made.
        self._sizes: dict[int, tuple[int, Any]] = {}
        self._clock = clock
        self._deadline_s = clock() + _SECONDS

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise OutOfBudget(f"the template handles more than {self.limit} characters, the limit")
        if self._clock() > self._deadline_s:
            raise OutOfBudget(f"the template runs for more than {_SECONDS:.0f} s, the limit")

    def grow(self, size: int) -> None:
        """Pay for a string of `size` characters."""
        if size > self.max_size:
            raise OutOfBudget(f"the template makes a value of {size} characters, the limit is {self.max_size}")
        self.spend(size)

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(STEP)
            yield item

    def join(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        self.grow(sum(map(len, texts)))
        return "".join(texts)

    def weigh(self, value: Any) -> Any:
        """Return `value` if its written size is allowed: a list may hold the same long list many times."""
        self._size_of(value)
        return value

    def _size_of(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, (list, tuple, dict)):
            return _NODE
        known = self._sizes.get(id(value))
        if known is not None:
            return known[0]
        self.spend(_NODE * (1 + len(value)))
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        size = _NODE + sum(map(self._size_of, parts))
        if size > self.max_size:
            raise OutOfBudget(f"the template makes a value of {size} characters, the limit is {self.max_size}")
        self._sizes[id(value)] = size, value
        return size

    def before_operator(self, operator: str, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise OutOfBudget(f"{operator} makes an integer of more than {_MAX_INTEGER_BITS} bits, the limit")
        elif operator == "*":
            many, count = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(count, int) and isinstance(many, (str, list, tuple)):
                self.grow(len(many) * max(count, 0))
        elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self.grow(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            self._format(left, _percent_widths(left), list(right) if isinstance(right, tuple) else [right])

    def before_call(self, name: str, subject: Any, arguments: list[Any], options: Mapping[str, Any]) -> None:
        """Pay for the call of a filter or a string method. `subject` is the value it is applied to."""
        self.spend(STEP + (len(subject) if isinstance(subject, (str, list, tuple, dict)) else 0))
        arguments = [*arguments, *options.values()]
        if name in _QUADRATIC:
            self.spend(self._size_of(subject) ** 2)
        if name == "replace" and len(arguments) >= 2:
            text, old, new = str(subject), str(arguments[0]), str(arguments[1])
            self.grow(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
        elif name == "join":
            # ", ".join(parts) has them the other way round than parts | join(", ")
            parts, between = (arguments[0], subject) if isinstance(subject, str) and arguments else (subject, arguments)
            self._join(parts, between)
        elif name == "sum" and isinstance(subject, (list, tuple)):
            self.grow(len(subject) * sum(len(part) for part in subject if isinstance(part, (list, tuple))))
        elif name in {"format", "format_map"} and isinstance(subject, str):
            self._format(subject, _brace_widths(subject), arguments)
        elif name in _TAKE_WIDTHS:
            self._widths(name, subject, arguments)

    def _join(self, parts: Any, between: Any) -> None:
        if not isinstance(parts, (list, tuple, dict)):
            return
        width = len(between) if isinstance(between, str) else sum(len(str(item)) for item in between)
        self.grow(sum(len(part) if isinstance(part, str) else STEP for part in parts) + len(parts) * width)

    def _format(self, text: str, widths: Iterable[str | None], arguments: list[Any]) -> None:
        """`widths`: how each field of `text` is written; None where that is itself an argument."""
        self.spend(len(text))
        num_fields = widest = 0
        for width in widths:
            self.spend(STEP)
            numbers = _NUMBER.findall(width or "")
            if width is None or any(len(number) > _MAX_DIGITS for number in numbers):
                raise OutOfBudget(f"a width in the format {text[:60]!r} is more than {_MAX_DIGITS} digits, the limit")
            widest = max(widest, *map(int, numbers), 0)
            num_fields += 1
        self.grow(len(text) + num_fields * (widest + max(map(self._size_of, arguments), default=0)))

    def _widths(self, name: str, subject: Any, arguments: list[Any]) -> None:
        widths = [len(item) if isinstance(item, str) else item for item in arguments if isinstance(item, (int, str))]
        width = max(widths, default=8)
        if width > _MAX_WIDTH:
            raise OutOfBudget(f"{name}: {width} is more than {_MAX_WIDTH}, the limit of a width")
        if isinstance(subject, str):
            self.grow(len(subject) + (subject.count("\n") + subject.count("\t") + 1) * width)


def _brace_widths(text: str) -> Iterator[str | None]:
    """The part behind the colon of each field of a text for `str.format`."""
    for _, field, width, _ in Formatter().parse(text):
        if field is not None:
            yield None if "{" in (width or "") else width or ""


def _percent_widths(text: str) -> Iterator[str | None]:
    """The flags, width and precision of each field of a text for `%`."""
    at = 0
    while at := text.find("%", at) + 1:
        begin = at = _after_key(text, at)
        while at < len(text) and (text[at] in "-+ #.*" or text[at].isdecimal()):
            at += 1
        yield None if "*" in text[begin:at] else text[begin:at]
        at += 1  # beyond the letter, which may be another percent sign


def _after_key(text: str, at: int) -> int:
    """The position after a key in brackets, which may hold brackets, if one is at `at`."""
    depth = 0
    while at < len(text) and (depth or text[at] == "("):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if not depth:
            break
    return at
