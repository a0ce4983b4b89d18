"""The types of value that the schema of an argument allows."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 256  # schemas that are looked at; a schema of more is not taken apart
_UNIONS = ("anyOf", "oneOf")
_SAYS_NOTHING = frozenset({"title", "description", "default", "examples", "$defs", "definitions"})
_KINDS = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object",
}  # fmt: skip


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a value follows one: unions are taken apart, and references to `root` are followed."""
    found: list[Mapping[str, Any]] = []
    left: list[Any] = [schema]
    for _ in range(MAX_STEPS):
        if not left:
            return found
        one = left.pop()
        if not isinstance(one, Mapping):
            one = {}
        parts = _parts(one, root)
        if parts is None:
            found.append(one)
        else:
            left += reversed(parts)
    return [schema] if isinstance(schema, Mapping) else [{}]


def says(schema: Mapping[str, Any]) -> frozenset[str]:
    """The keys of a schema that restrict its values."""
    return frozenset(schema) - _SAYS_NOTHING


def kind_of(value: Any) -> str:
    """The type that a JSON value has in schemas."""
    return _KINDS[type(value)]


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The names of the types that an alternative allows; none where it does not say."""
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(schema.get("enum"), list):
        return {kind_of(one) for one in schema["enum"]}
    return {kind_of(schema["const"])} if "const" in schema else set()


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    """The schemas that one is put together of; None where it stands for itself."""
    said = says(schema)
    if said == {"$ref"}:
        target = referred(schema["$ref"], root)
        return None if target is None else [target]
    if said == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
        return [schema["allOf"][0]]
    for union in _UNIONS:
        if said == {union} and isinstance(schema[union], list) and schema[union]:
            return [*schema[union]]
    types = schema.get("type")
    if isinstance(types, list) and types and all(isinstance(one, str) for one in types):
        return [{**schema, "type": one} for one in types]
    return None


def referred(reference: Any, root: Any) -> Any:
    """The schema that a reference names; None if it is not within `root`, a document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and len(key) < 9 and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found
