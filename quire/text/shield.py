"""Distinguishes special tokens that a client typed from those that a chat template writes.

A chat template makes one text of its own control tokens and of what clients wrote; in that text `<|im_start|>` looks
the same wherever it comes from. So before a conversation is rendered, every special token in what the client wrote is
broken by a mark, a character that nothing in the request has. After rendering, the special tokens that are whole are
the template's. Each is replaced by a stand-in, the marks are taken out, and a tokenizer that knows the stand-ins, and
reads special tokens as plain text, encodes the whole in one go: exactly as the vocabulary's rules have it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import invalid

STAND_INS = 0x100000  # the first of the characters that stand for special tokens, in a plane for private use
_MARKS = range(0xF800, 0xF900)  # characters for private use
_NEVER = "(?!)"
_WORD = re.compile(r"\w*")
_NAMES_OF_KINDS = ("type", "role")  # fields by which templates tell messages and parts apart
_BETWEEN = "\0"  # strings that are searched together


@dataclass(frozen=True)
class RenderedPrompt:
    """A rendered conversation. `standing` is the text with stand-ins for special tokens, in which all others are plain
    text; None where the client typed none."""

    text: str
    standing: str | None = None


class Shield:
    """The special tokens of a vocabulary, to be found in what clients wrote.

    Fixed once made; any thread may use it.
    """

    def __init__(self, specials: Iterable[str]) -> None:
        self.specials = sorted({special for special in specials if len(special) > 1})
        self._stand_in_of = {special: chr(STAND_INS + index) for index, special in enumerate(self.specials)}
        self._pattern = re.compile(_alternatives(self.specials))
        self._prefixes = frozenset(word[:end] for word in self.specials for end in range(1, len(word)))
        self._suffixes = frozenset(word[begin:] for word in self.specials for begin in range(1, len(word)))
        self._first_characters = frozenset(word[0] for word in self.specials)
        self._last_characters = frozenset(word[-1] for word in self.specials)
        self._longest = max(map(len, self.specials), default=0)
        self._all = _BETWEEN.join(self.specials)

    def touches(self, values: Any) -> bool:
        """True if a string in `values` has a special token, or a part of one that other strings could complete."""
        strings = [*_strings(values)]
        return bool(self._pattern.search(_BETWEEN.join(strings))) or any(
            any(self._fragment_ends(string.strip())) for string in strings
        )

    def new_mark(self, values: Any, source: str) -> str:
        """A character that neither `values` nor the template `source` has, written out or as JSON escapes it."""
        text = (_BETWEEN.join(_strings(values)) + source).lower()
        for code in _MARKS:
            if chr(code) not in text and f"\\u{code:04x}" not in text:
                return chr(code)
        raise invalid(
            "messages", f": special tokens and all of U+{_MARKS[0]:04X} to U+{_MARKS[-1]:04X} are in it; leave one out"
        )

    def marked(self, value: Any, mark: str) -> Any:
        """A copy of `value` in which no string has a special token, nor a part that others could complete."""
        if isinstance(value, str):
            return self._mark(value, mark)
        if isinstance(value, Mapping):
            return {
                self._mark(key, mark): item
                if key in _NAMES_OF_KINDS and isinstance(item, str) and _is_word(item)
                else self.marked(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.marked(item, mark) for item in value]
        return value

    def resolved(self, text: str, mark: str) -> RenderedPrompt:
        """The rendering of marked values, without the marks."""
        marks = re.compile(rf"{mark}|\\u{ord(mark):04x}", re.IGNORECASE)
        plain = marks.sub("", text)
        standing = marks.sub("", self._with_stand_ins(text))
        if standing == self._with_stand_ins(plain):
            return RenderedPrompt(plain)
        taken = re.search(f"[{chr(STAND_INS)}-{chr(STAND_INS + len(self.specials))}]", plain)
        if taken is not None:
            raise invalid("messages", f": special tokens and U+{ord(taken[0]):X} are both in it; leave one out")
        return RenderedPrompt(plain, standing)

    def _with_stand_ins(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._stand_in_of[found[0]], text)

    def _mark(self, text: str, mark: str) -> str:
        while self._pattern.search(text):
            text = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        inner = text.strip()
        opens, closes = self._fragment_ends(inner)
        if opens or closes:
            text = text.replace(inner, (mark if opens else "") + inner + (mark if closes else ""), 1)
        return text

    def _fragment_ends(self, text: str) -> tuple[bool, bool]:
        """For the beginning and the end of stripped `text`: true if its neighbour could complete a special token there.

        Words are no fragments: they are names and kinds, which templates compare.
        """
        if _is_word(text):
            return False, False
        if len(text) < self._longest and text in self._all:
            return True, True
        window = range(1, min(self._longest, len(text) + 1))
        opens = not self._last_characters.isdisjoint(text[: self._longest]) and any(
            text[:length] in self._suffixes and not _is_word(text[:length]) for length in window
        )
        closes = not self._first_characters.isdisjoint(text[-self._longest :]) and any(
            text[-length:] in self._prefixes and not _is_word(text[-length:]) for length in window
        )
        return opens, closes


def _is_word(text: str) -> bool:
    return _WORD.fullmatch(text) is not None


def _strings(value: Any) -> Iterator[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _alternatives(words: Iterable[str]) -> str:
    """A pattern of the longest word at a place. One branch for each letter, as there may be thousands of words."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _branches(tree) if tree else _NEVER


def _branches(node: dict[str, Any]) -> str:
    written = ""
    while len(node) == 1 and "" not in node:  # a run of letters without a choice
        ((letter, node),) = node.items()
        written += re.escape(letter)
    branches = [re.escape(letter) + _branches(after) for letter, after in node.items() if letter]
    if not branches:
        return written
    return f"{written}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
