"""Parts of grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Mapping

from quire.text.tokenizer import Tokenizer

ANY_TEXT = "/(.|\\n)*/"

# Marks that are tokens of their own, by their texts. The library lets no text spell them.
Marks = Mapping[str, int]


def mark_tokens(tokenizer: Tokenizer, marks: tuple[str, ...]) -> dict[str, int]:
    """The `marks` that are added tokens of the vocabulary and special, or in angle brackets, as the library has
    it."""
    found = {mark: tokenizer.added_id(mark) for mark in marks}
    return {
        mark: token
        for mark, token in found.items()
        if token is not None and (tokenizer.is_special(token) or (mark.startswith("<") and mark.endswith(">")))
    }


def terms(text: str, marks: Marks) -> str:
    """`text` in a rule: quoted, its marks by number."""
    parts = [text]
    for mark in marks:
        parts = [piece for part in parts for piece in re.split(f"({re.escape(mark)})", part)]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part)


def text_up_to(name: str, text: str, marks: Marks) -> str:
    """A rule for any text that ends with `text`, at the first place where that stands."""
    ends = terms(text, marks)
    first = ends.split(" ", 1)[0]
    if first.startswith("<["):
        return f"{name}: {ANY_TEXT} {ends}"
    if "<[" not in ends:
        return f"{name}[lazy]: /(.|\\n)*{_escaped(text)}/"
    literal, rest = ends.split(" <[", 1)
    return f"{name}: {name}_text <[{rest}\n{name}_text[lazy]: /(.|\\n)*{_escaped(json.loads(literal))}/"


def _escaped(text: str) -> str:
    """`text` escaped for a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")
