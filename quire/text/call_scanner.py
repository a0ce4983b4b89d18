"""Reads the calls that models write, one character at a time.

Every reader is a generator that is sent the next character, and "" at the end of the answer. So it does not matter how
an answer is cut, and each character is looked at once.
"""

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Reads = Generator[None, str, T]

MAX_DEPTH = 64
MAX_NAME = 128  # as APIs allow
MAX_NUMBER = 400
_BLANKS = " \n\r\t"
_DIGITS = "0123456789"
_NUMBER = frozenset("+-.eE" + _DIGITS)
_IS_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IS_HEX = re.compile("[0-9a-fA-F]+")
_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}


class Malformed(Exception):
    """The text that was read is no call."""


class Scanner:
    """The characters of an answer, and readers of what they spell. `out` has the JSON of values that were read."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.to = self.out  # what is read now goes here
        self._back = ""  # a character that was read too far

    def next(self) -> Reads[str]:
        if self._back:
            char, self._back = self._back, ""
            return char
        return (yield)

    def back(self, char: str) -> None:
        """Read `char` again."""
        self._back = char

    def unread(self) -> str:
        """The character that was read too far."""
        char, self._back = self._back, ""
        return char

    def blank(self) -> Reads[str]:
        """The first character that is not whitespace."""
        while (char := (yield from self.next())) and char in _BLANKS:
            pass
        return char

    def literal(self, text: str) -> Reads[None]:
        for expected in text:
            if (yield from self.next()) != expected:
                raise Malformed

    def either(self, first: str, second: str) -> Reads[str]:
        """The one of two texts that follows. Neither is a prefix of the other."""
        found = ""
        while found not in (first, second):
            found += (yield from self.next()) or "\0"
            if not (first.startswith(found) or second.startswith(found)):
                raise Malformed
        return found

    def literal_after_blanks(self, text: str) -> Reads[None]:
        self.back((yield from self.blank()))
        yield from self.literal(text)

    def name(self, known: Sequence[str] = ()) -> Reads[str]:
        """The name of a function or of an argument. Those in `known`, which is sorted, may have any characters."""
        found: list[str] = []
        low, high = 0, len(known)  # those that begin with what was found
        while char := (yield from self.next()):
            if low < high:
                low, high = _narrowed(known, low, high, len(found), char)
            is_plain = char.isalnum() or char in "_.-"
            if low == high and not (is_plain and len(found) < MAX_NAME):
                if is_plain:
                    raise Malformed
                break
            found.append(char)
        if not found:
            raise Malformed
        self.back(char)
        return "".join(found)

    def until(self, mark: str) -> Reads[str]:
        """The text before `mark`."""
        text: list[str] = []
        last, size = mark[-1], len(mark)
        while char := (yield from self.next()):
            text.append(char)
            if char == last and "".join(text[-size:]) == mark:
                return "".join(text[:-size])
        raise Malformed

    def word_until(self, last: str) -> Reads[str]:
        """The name before the character `last`."""
        found = yield from self.name()
        yield from self.literal(last)
        return found

    def word(self) -> Reads[str]:
        """The letters that follow; may be empty."""
        found = ""
        while (char := (yield from self.next())) and char.isalpha() and len(found) < MAX_NAME:
            found += char
        self.back(char)
        return found

    def characters(self, quote: str, escape: Callable[[], Reads[str]], write: Callable[[str], None]) -> Reads[None]:
        """The rest of a string up to `quote`. Two escapes that are one character come as that; halves are replaced."""
        high = ""  # the first half of a pair
        while (char := (yield from self.next())) != quote:
            if not char:
                raise Malformed
            text = high + ((yield from escape()) if char == "\\" else char)
            high = text[-1:] if "\ud800" <= text[-1:] < "\udc00" else ""
            write(_whole(text.removesuffix(high)))
        write(_whole(high))


def _narrowed(names: Sequence[str], low: int, high: int, at: int, char: str) -> tuple[int, int]:
    """Of the sorted `names` from `low` to `high`, which are alike up to `at`, the range of those with `char` there."""

    def letter(name: str) -> str:
        return name[at : at + 1]

    low = bisect_left(names, char, low, high, key=letter)
    return low, bisect_right(names, char, low, high, key=letter)


def _whole(text: str) -> str:
    """`text` with its surrogates joined, and those that are alone replaced."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ValueScanner(Scanner, ABC):
    """Reads values in one of the notations that models have for them, and writes them to `out` as JSON."""

    words: Mapping[str, str] = {"true": "true", "false": "false", "null": "null"}

    def value(self, depth: int = 0) -> Reads[None]:
        char = yield from self.blank()
        if not char or depth > MAX_DEPTH:
            raise Malformed
        if char == "{":
            yield from self.members(depth)
        elif char == "[":
            yield from self._items(depth)
        elif char == "-" or char in _DIGITS:
            yield from self._number(char)
        elif char.isalpha():
            self.back(char)
            found = yield from self.word()
            if found not in self.words:
                raise Malformed
            self.to.append(self.words[found])
        else:
            yield from self.string(char)

    def aside(self, reads: Reads[None]) -> Reads[str]:
        """The text that `reads` writes, which does not go to `out`."""
        self.to = []
        yield from reads
        written, self.to = "".join(self.to), self.out
        return written

    @abstractmethod
    def string(self, char: str) -> Reads[None]:
        """A string that begins with `char`."""

    def key(self, char: str) -> Reads[None]:
        """The key of an object, which begins with `char`."""
        yield from self.string(char)

    def members(self, depth: int) -> Reads[None]:
        """The rest of an object."""
        self.to.append("{")
        char = yield from self.blank()
        while char != "}":
            yield from self.key(char)
            yield from self.literal_after_blanks(":")
            self.to.append(": ")
            yield from self.value(depth + 1)
            char = yield from self._after_item("}")
        self.to.append("}")

    def _items(self, depth: int) -> Reads[None]:
        self.to.append("[")
        char = yield from self.blank()
        while char != "]":
            self.back(char)
            yield from self.value(depth + 1)
            char = yield from self._after_item("]")
        self.to.append("]")

    def _after_item(self, last: str) -> Reads[str]:
        """`last`, or the first character of the next item."""
        char = yield from self.blank()
        if char == last:
            return char
        char = (yield from self.blank()) if char == "," else ""
        if not char or char == last:
            raise Malformed
        self.to.append(", ")
        return char

    def _number(self, char: str) -> Reads[None]:
        found = ""
        while char and char in _NUMBER and len(found) < MAX_NUMBER:
            found += char
            char = yield from self.next()
        if not _IS_NUMBER.fullmatch(found):
            raise Malformed
        self.back(char)
        self.to.append(found)


class JsonScanner(ValueScanner):
    """JSON. Control characters and wrong escapes in strings are put right."""

    def string(self, char: str) -> Reads[None]:
        if char != '"':
            raise Malformed
        out = self.to
        out.append(char)
        while char := (yield from self.next()):
            if char == "\\":
                out.append((yield from self._escape()))
            else:
                out.append(char if char >= " " else json.dumps(char)[1:-1])
                if char == '"':
                    return
        raise Malformed

    def _escape(self) -> Reads[str]:
        char = yield from self.next()
        if not char:
            raise Malformed
        if char == "u":
            digits = ""
            for _ in range(4):
                digits += yield from self.next()
            if not _IS_HEX.fullmatch(digits):
                raise Malformed
            return "\\u" + digits
        if char in _ESCAPES:
            return "\\" + char
        return char if char == "'" else "\\\\" + char

    def text(self) -> Reads[str]:
        """The text of the string that comes."""
        char = yield from self.blank()
        written = yield from self.aside(self.string(char))
        text: str = json.loads(written)
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise Malformed
        return text


class PythonScanner(ValueScanner):
    """Literals of Python's."""

    words = ValueScanner.words | {"True": "true", "False": "false", "None": "null"}  # type: ignore[operator]

    def string(self, char: str) -> Reads[None]:
        if char not in ("'", '"'):
            raise Malformed
        self.to.append('"')
        yield from self.characters(char, self._escape, self._write)
        self.to.append('"')

    def _write(self, text: str) -> None:
        """Write `text` as part of a JSON string."""
        self.to.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escape(self) -> Reads[str]:
        char = yield from self.next()
        size = {"x": 2, "u": 4}.get(char)
        if size is None:
            return _PYTHON_ESCAPES.get(char, "\\" + char)
        digits = ""
        for _ in range(size):
            digits += yield from self.next()
        if not _IS_HEX.fullmatch(digits):
            raise Malformed
        return chr(int(digits, 16))


class MarkedScanner(ValueScanner):
    """JSON with bare keys, and strings between two of a mark, as Gemma's models write it."""

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self.known: Sequence[str] = ()  # keys of arguments, sorted

    def string(self, char: str) -> Reads[None]:
        self.back(char)
        yield from self.literal(self._quote)
        self.to.append('"')
        held = ""  # possibly the start of the mark
        while held != self._quote:
            if not (char := (yield from self.next())):
                raise Malformed
            held += char
            while not self._quote.startswith(held):
                self.to.append(json.dumps(held[0], ensure_ascii=False)[1:-1])
                held = held[1:]
        self.to.append('"')

    def key(self, char: str) -> Reads[None]:
        self.back(char)
        self.to.append(json.dumps((yield from self.name(self.known))))
