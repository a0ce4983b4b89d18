"""From a JSON object to a typed request, or to an error that names the field."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from quire.errors import InvalidRequest, invalid, shown

T = TypeVar("T", bound=msgspec.Struct)

MAX_NAME = 80  # characters of an unknown field's name in a message


class Refusal(NamedTuple):
    """A field that is known and not supported. Values that ask for nothing pass."""

    reason: str
    inert: tuple[Any, ...] = ()


def typed(
    raw: Mapping[str, Any], struct: type[T], refused: Mapping[str, Refusal], *, strict: bool, where: str = ""
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
                raise invalid(f"{where}{name}", f"is {shown(value)}: {refusal.reason}")
        elif strict:
            raise invalid(f"{where}{name[:MAX_NAME]}", "is not a field of this route")
        else:
            unknown.append(f"{where}{name[:MAX_NAME]}")
    try:
        return msgspec.convert({name: raw[name] for name in known if name in raw}, struct), unknown
    except msgspec.ValidationError as error:
        raise _invalid(str(error), raw, where) from None


def _invalid(message: str, raw: Mapping[str, Any], where: str) -> InvalidRequest:
    """The library's message names the place; add the value that stands there."""
    what, _, path = message.partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    if not place:
        return InvalidRequest(f"{where}{what}")
    value: Any = raw
    for step in re.findall(r"\[(\d+)\]|([^.\[\]]+)", place):
        index, key = step
        try:
            value = value[int(index)] if index else value[key]
        except (LookupError, TypeError):
            return invalid(f"{where}{place}", f": {what}")
    return invalid(f"{where}{place}", f"is {shown(value)}: {what}")
