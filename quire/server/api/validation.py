"""Converts a JSON object to a typed request, or raises an error that names the field."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from quire.errors import InvalidRequest, invalid, shown

T = TypeVar("T", bound=msgspec.Struct)

MAX_NAME = 80  # characters of an unknown field's name in a message
_NAMED_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_MAX_WHOLE = 2**53  # below this, floats represent every integer exactly


class Refusal(NamedTuple):
    """A known field that is not supported. Values that have no effect are accepted."""

    reason: str
    inert: tuple[Any, ...] = ()

    def check(self, field: str, value: Any) -> None:
        if value is not None and value not in self.inert:
            raise invalid(field, f"is {shown(value)}: {self.reason}")


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
            refused[name].check(f"{where}{name}", value)
        elif strict:
            raise invalid(f"{where}{name[:MAX_NAME]}", "is not a field of this route")
        else:
            unknown.append(f"{where}{name[:MAX_NAME]}")
    try:
        return msgspec.convert(
            _with_integers({name: raw[name] for name in known if name in raw}, struct), struct
        ), unknown
    except msgspec.ValidationError as error:
        raise _invalid(str(error), raw, where) from None


def whole(value: Any) -> Any:
    """3 for 3.0, which JavaScript and spreadsheets do not tell apart; anything else as it is. Also inside a list."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_WHOLE:
        return int(value)
    return [whole(item) for item in value] if isinstance(value, list) else value


def _with_integers(raw: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    return raw | {name: whole(raw[name]) for name in _integer_fields(struct) if name in raw}


@cache
def _integer_fields(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields that are integers or lists of them."""
    return tuple(name for name, hint in get_type_hints(struct).items() if _takes_integers(hint))


def _takes_integers(hint: Any) -> bool:
    if get_origin(hint) is dict:
        return False
    return hint is int or any(_takes_integers(each) for each in get_args(hint))


def _invalid(message: str, raw: Mapping[str, Any], where: str) -> InvalidRequest:
    """Add the value to the library's message, which names its place."""
    what, _, path = message.partition(" - at `$")
    place = path.rstrip("`").lstrip(".").replace("[...]", "")  # any value of an object
    named = _NAMED_FIELD.fullmatch(what)
    if named is not None:
        problem = "is missing" if named[1] == "missing required" else "is not a field of this route"
        return invalid(f"{where}{place}{'.' if place else ''}{named[2][:MAX_NAME]}", problem)
    if not place:
        return InvalidRequest(f"{where}{what}")
    value: Any = raw
    for step in filter(None, place.replace("[", ".").replace("]", "").split(".")):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (LookupError, TypeError, ValueError):
            return invalid(f"{where}{place}", f": {what}")
    return invalid(f"{where}{place}", f"is {shown(value)}: {what}")
