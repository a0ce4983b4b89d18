"""From a body's bytes to a typed request, or to an error that names the field."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from quire.errors import InvalidRequest
from quire.text.json_text import parse_json_text

T = TypeVar("T", bound=msgspec.Struct)

_SHOWN = 80  # characters of a value that an error repeats


class Refusal(NamedTuple):
    """A field that is known and not supported. Values that ask for nothing pass."""

    reason: str
    inert: tuple[Any, ...] = ()


def parse_json(body: bytes) -> dict[str, Any]:
    """The body, as an object."""
    found = parse_json_text("body", body)
    if not isinstance(found, dict):
        raise InvalidRequest(f"body: a JSON {_json_name(found)}; it must be an object")
    return found


def typed(
    raw: Mapping[str, Any],
    struct: type[T],
    refused: Mapping[str, Refusal],
    *,
    strict: bool,
    where: str = "",
) -> tuple[T, list[str]]:
    """The typed request, and the names of fields that nothing here knows. In strict mode those are errors."""
    known = frozenset(struct.__struct_encode_fields__)
    unknown: list[str] = []
    for name, value in raw.items():
        if name in known:
            continue
        if name in refused:
            refusal = refused[name]
            if value is not None and value not in refusal.inert:
                raise InvalidRequest(f"{where}{name} is {shown(value)}: {refusal.reason}")
        elif strict:
            raise InvalidRequest(f"{where}{name[:_SHOWN]} is not a field of this route")
        else:
            unknown.append(f"{where}{name[:_SHOWN]}")
    try:
        return msgspec.convert({name: raw[name] for name in known if name in raw}, struct), unknown
    except msgspec.ValidationError as error:
        raise InvalidRequest(_described(str(error), raw, where)) from None


def shown(value: Any) -> str:
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _described(message: str, raw: Mapping[str, Any], where: str) -> str:
    """The library's message names the place; add what stands there."""
    what, _, path = message.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    if not place:
        return f"{where}{what}"
    value: Any = raw
    for step in re.findall(r"\[(\d+)\]|([^.\[\]]+)", place):
        index, key = step
        try:
            value = value[int(index)] if index else value[key]
        except (LookupError, TypeError):
            return f"{where}{place}: {what}"
    return f"{where}{place} is {shown(value)}: {what}"


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), type(value).__name__)
