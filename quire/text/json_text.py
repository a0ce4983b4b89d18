"""Parses JSON from clients: bodies of requests, and the schemas and arguments within them."""

from typing import Any

import msgspec

from quire.errors import invalid

MAX_DEPTH = 64
MAX_VALUES = 65_536  # objects, arrays, and fields of objects: each costs microseconds in Python


def parse_json_text(name: str, text: str | bytes) -> Any:
    """The value that `text`, the field `name`, stands for; no deeper than `MAX_DEPTH`, of no more than `MAX_VALUES`."""
    try:
        found = msgspec.json.decode(text)
    except RecursionError:
        raise invalid(name, f": nested deeper than {MAX_DEPTH} levels") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        if not text.strip():
            raise invalid(name, "is empty; it must be JSON") from None
        raise invalid(name, f": not valid JSON: {_lone_surrogate(text) or error}") from None
    _check_structure(name, found)
    return found


def _lone_surrogate(text: str | bytes) -> str | None:
    """The error for half of a surrogate pair, where `text` fails by one.

    Where fewer characters follow than the other half has, the parser says that the text is cut off. Spaces after it
    change nothing else.
    """
    try:
        msgspec.json.decode(text + " " * 6 if isinstance(text, str) else text + b" " * 6)
    except (msgspec.MsgspecError, UnicodeError) as error:
        return str(error) if "surrogate" in str(error) else None
    return None


def _check_structure(name: str, value: Any) -> None:
    """Refuse what is nested deeper than `MAX_DEPTH`, on which code after this runs out of stack, or has many values."""
    level = [value] if isinstance(value, (dict, list)) else []
    num_values = 0
    for _ in range(MAX_DEPTH):
        num_values += len(level) + sum(len(one) for one in level if isinstance(one, dict))
        if num_values > MAX_VALUES:
            raise invalid(name, f": more than {MAX_VALUES} objects, arrays and fields of objects, the limit")
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise invalid(name, f": nested deeper than {MAX_DEPTH} levels")
