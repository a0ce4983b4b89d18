"""Limits of a client's grammar, checked before it is compiled. Every check takes time linear in the grammar's size."""

from collections.abc import Iterator
from typing import Any

from quire.errors import invalid
from quire.grammar.closed_schema import STYLE, STYLE_PATTERNS
from quire.grammar.regex_size import MAX_COUNT, expanded
from quire.request import Grammar, GrammarKind, json_schema
from quire.text.json_text import parse_json_text

MAX_BYTES = 256 * 1024
# Characters that a regular expression stands for, each {n} written out: every token costs a share of a microsecond for
# each that the expression leaves no choice about.
MAX_EXPANDED = 10_000
MAX_LITERAL = 4_096  # characters of a string in a schema
_SHOWN_PLACE = 120  # characters of a place in a schema that an error names


def refuse_what_explodes(name: str, grammar: Grammar) -> None:
    """Raise when `grammar`, the field `name`, is large, or larger than it looks."""
    check_size(name, grammar.text)
    if grammar.kind is GrammarKind.REGEX:
        check_regex(name, grammar.text)
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        _check_schema(name, parse_json_text(name, grammar.text))


def refuse_schema_that_explodes(name: str, schema: Any) -> int:
    """Raise when `schema`, the field `name`, is large, or larger than it looks. Returns its bytes as JSON."""
    text = json_schema(schema).text
    check_size(name, text)
    _check_schema(name, schema)
    return len(text)


def check_size(name: str, text: str, limit: int = MAX_BYTES) -> None:
    if len(text) > limit:  # first: later checks take longer for longer texts
        raise invalid(name, f"has {len(text)} characters; the limit is {limit} bytes")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(name, f"has half of a surrogate pair at {error.start}; it must be valid Unicode") from None
    if size > limit:
        raise invalid(name, f"has {size} bytes; the limit is {limit}")


def _check_schema(name: str, schema: Any) -> None:
    for place, key, value in _entries(schema, name):
        if key == "pattern" and isinstance(value, str):
            check_regex(f"{place}.pattern", value)
        elif key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                check_regex(f"{place}.patternProperties", pattern)
        elif key == STYLE and isinstance(value, dict):
            for style in STYLE_PATTERNS:
                if isinstance(value.get(style), str):
                    check_regex(f"{place}.{STYLE}.{style}", value[style])
        for text in (key, value):
            if isinstance(text, str) and len(text) > MAX_LITERAL:
                raise invalid(place, f"has a string of {len(text)} characters; the limit is {MAX_LITERAL}")


def check_regex(name: str, pattern: str, size_before: int = 0) -> int:
    """The characters that `pattern` stands for. Raises when they, and those of patterns before it, are too many."""
    try:
        size = size_before + expanded(pattern)
    except ValueError as error:
        raise invalid(name, f"is no regular expression that can be followed: {error}") from None
    if size > MAX_EXPANDED:
        shown = str(size) if size < MAX_COUNT else f"{MAX_COUNT} or more"
        raise invalid(
            name,
            f"is a regular expression of {shown} characters once its repetitions are written out; "
            f"the limit is {MAX_EXPANDED}",
        )
    return size - size_before


def _entries(document: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """Every key and value in a document, with the place of what holds it."""
    left = [(place, document)]
    while left:
        place, value = left.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                yield place, key, item
                if isinstance(item, (dict, list)):
                    left.append((f"{place}.{key}"[:_SHOWN_PLACE], item))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield place, "", item
                if isinstance(item, (dict, list)):
                    left.append((f"{place}[{index}]"[:_SHOWN_PLACE], item))
