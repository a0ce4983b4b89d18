"""What a client may ask of a grammar before it is looked at any closer."""

import json
import re
from collections.abc import Iterator
from typing import Any

from quire.errors import InvalidRequest
from quire.request import Grammar, GrammarKind

MAX_BYTES = 256 * 1024
# Characters that a regular expression stands for, each {n} written out: every token costs a share of a microsecond for
# each that the expression leaves no choice about.
MAX_EXPANDED = 10_000
MAX_LITERAL = 4_096  # characters of a string in a schema

_REPEAT = re.compile(r"\{(\d+)(,(\d*))?\}")
_NAMED = re.compile(r"\\[pPxuU]\{[^}]*\}")  # braces that are no repetition


def refuse_what_explodes(name: str, grammar: Grammar) -> None:
    """Raise when `grammar`, the field `name`, is large, or larger than it looks."""
    size = len(grammar.text.encode())
    if size > MAX_BYTES:
        raise InvalidRequest(f"{name} has {size} bytes; the limit is {MAX_BYTES}")
    if grammar.kind is GrammarKind.REGEX:
        _check_regex(name, grammar.text)
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        refuse_schema_that_explodes(name, json.loads(grammar.text))


def refuse_schema_that_explodes(name: str, schema: Any) -> None:
    for place, key, value in _entries(schema, name):
        if key == "pattern" and isinstance(value, str):
            _check_regex(f"{place}.pattern", value)
        elif key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                _check_regex(f"{place}.patternProperties", pattern)
        for text in (key, value):
            if isinstance(text, str) and len(text) > MAX_LITERAL:
                raise InvalidRequest(f"{place} has a string of {len(text)} characters; the limit is {MAX_LITERAL}")


def _check_regex(name: str, pattern: str) -> None:
    size = expanded(pattern)
    if size > MAX_EXPANDED:
        raise InvalidRequest(
            f"{name} is a regular expression of {size} characters once its repetitions are written out; "
            f"the limit is {MAX_EXPANDED}"
        )


def expanded(pattern: str) -> int:
    """How many characters and classes `pattern` has, each as often as it is repeated. What is no regular expression
    is counted as well as it can be."""
    totals = [0]  # of each open group
    last = 0  # of what a repetition would repeat
    at = 0
    while at < len(pattern):
        char = pattern[at]
        named = _NAMED.match(pattern, at)
        repeat = _REPEAT.match(pattern, at)
        if repeat is not None:
            times = max(int(number or 0) for number in (repeat[1], repeat[3]))
            totals[-1] += last * (times - 1)
            last *= times
            at = repeat.end()
            continue
        if char == "(":
            totals.append(0)
            last = 0
        elif char == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif char not in "|*+?^$":
            last = 1
            totals[-1] += 1
            if named is not None:
                at = named.end()
                continue
            if char == "\\":
                at += 1
            elif char == "[":
                at = _class_end(pattern, at)
        at += 1
    return sum(totals)


def _class_end(pattern: str, at: int) -> int:
    """Where the class that opens at `at` closes. Classes may hold classes."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
            if not depth:
                return at
        at += 1
    return at


def _entries(value: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """Every key and value in a document, with the place of what holds it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield place, key, item
            yield from _entries(item, f"{place}.{key}"[:120])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield place, "", item
            yield from _entries(item, f"{place}[{index}]")
