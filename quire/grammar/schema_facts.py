"""Facts about the subschemas of a JSON schema: what references name, which keys are known, which values are listed."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from quire.errors import InvalidRequest
from quire.text.alternatives import referred

MAX_WORK = 500_000  # on one document: keys looked at, a subschema counted as ten
MAX_CHAIN = 100  # references that lead to references

Schema = dict[str, Any]


class Names(NamedTuple):
    """The keys that a schema, or the schemas that it is put together of, speak of."""

    keys: tuple[str, ...] = ()  # each once, in the order of the schema
    patterns: tuple[str, ...] = ()
    is_open: bool = False  # it describes further keys, or cannot be analysed

    def __or__(self, other: object) -> "Names":
        assert isinstance(other, Names)
        if not other.keys and not other.patterns:
            return self if self.is_open or not other.is_open else self._replace(is_open=True)
        keys, patterns = (*self.keys, *other.keys), (*self.patterns, *other.patterns)
        return Names(_once(keys), _once(patterns), self.is_open or other.is_open)


class SchemaFacts:
    """Answers questions about the subschemas of one document. Every answer takes a bounded time."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._work = 0
        self._names: dict[int, Names] = {}  # by identity; the document holds them all
        self._listed: dict[int, tuple[Schema, dict[str, Any] | None]] = {}  # the same, with the schemas

    def count(self, work: int = 10) -> None:
        """Count work; raise when it is too much."""
        self._work += work
        if self._work > MAX_WORK:
            raise InvalidRequest("the schema is too complex: too many schemas that are put together of others")

    def union(self, parts: Iterable[Names]) -> Names:
        """The keys of all parts."""
        found = Names()
        for names in parts:
            self.count(1 + len(found.keys) + len(names.keys) + len(names.patterns))
            found |= names
        return found

    def target(self, schema: Schema) -> Any:
        """The schema that `$ref` names; None if it is not within the document."""
        return referred(schema.get("$ref"), self._root)

    def resolved(self, schema: Any) -> Any:
        """`schema`, or what it stands for when it is nothing but a reference."""
        for _ in range(MAX_CHAIN):
            if not isinstance(schema, dict) or "$ref" not in schema or any(key in schema for key in COMBINING):
                return schema
            target = self.target(schema)
            if target is None or schema.keys() & (_NARROWING - {"$ref"} | {"type", "enum", "const"}):
                return schema
            schema = target
        return schema

    def names(self, schema: Any, depth: int = 0) -> Names:
        """The keys that `schema` and the schemas it is put together of speak of."""
        if not isinstance(schema, dict):
            return Names()
        known = self._names.get(id(schema))
        if known is not None:
            return known
        if depth > MAX_CHAIN:
            raise InvalidRequest(f"the schema is too complex: more than {MAX_CHAIN} references follow each other")
        self.count()
        self._names[id(schema)] = Names()  # of one that contains itself
        parts = [own_names(schema)]
        if "$ref" in schema:
            parts.append(self.target_names(schema, depth + 1))
        parts += [self.names(part, depth + 1) for part in parts_of(schema)]
        self._names[id(schema)] = found = self.union(parts)
        return found

    def target_names(self, schema: Schema, depth: int = 0) -> Names:
        """The keys of the schema that `$ref` names."""
        target = self.target(schema)
        return Names(is_open=True) if target is None else self.names(target, depth)

    def values(self, schema: Any) -> list[Any] | None:
        """All values that `schema` allows, each once, in its order; None if it does not list them."""
        listed = self._values_by_key(self.resolved(schema))
        return None if listed is None else list(listed.values())

    def _values_by_key(self, schema: Any) -> dict[str, Any] | None:
        """The values that `schema` lists, by keys that are equal where they are."""
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._listed:
            self._listed[id(schema)] = schema, self._listed_in(schema)
        found = self._listed[id(schema)][1]
        self.count(len(found or ()))
        return found

    def _listed_in(self, schema: Schema) -> dict[str, Any] | None:
        if schema.keys() & _NARROWING:
            return None
        kinds = schema.get("type")
        by_type: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
        listed = schema.get("enum", [schema["const"]] if "const" in schema else by_type.get(str(kinds)))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(listed, list) or not isinstance(kinds, list | None):
            return None
        only = _key(schema["const"]) if "const" in schema else None
        found: dict[str, Any] = {}
        for value in listed:
            key = _key(value)
            if only in (None, key) and (kinds is None or any(_has_type(value, kind) for kind in kinds)):
                found.setdefault(key, value)
        return found

    def are_exclusive(self, one: Any, other: Any, around: Names) -> bool:
        """True if no answer to one of two schemas, once they are closed, is one to the other as well.

        `around` has the keys of the schemas that they are combined with, which both let pass.
        """
        self.count()
        one, other = self.resolved(one), self.resolved(other)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        if self._differ(one, other):
            return True
        if _is_combined(one) or _is_combined(other):
            return False
        if not (one.get("type") == other.get("type") == "object"):
            return False
        left, right = _properties(one), _properties(other)
        needs_left, needs_right = _required(one), _required(other)
        for key in (needs_left.keys() | needs_right.keys()) & left.keys() & right.keys():
            if self._differ(self.resolved(left[key]), self.resolved(right[key])):
                return True
        # A closed object lacks what the other needs.
        closed = "additionalProperties" not in one and "additionalProperties" not in other
        closed = closed and "patternProperties" not in one and "patternProperties" not in other
        closed = closed and not around.patterns and not around.is_open
        self.count(len(around.keys))
        passes = set(around.keys)
        lacks = needs_right.keys() - left.keys() - passes and needs_left.keys() - right.keys() - passes
        return closed and bool(left and right and lacks)

    def _differ(self, one: Any, other: Any) -> bool:
        """True if two schemas differ in their types or in their values."""
        self.count()
        left, right = self._values_by_key(one), self._values_by_key(other)
        if left is not None and right is not None:
            return left.keys().isdisjoint(right)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        kinds, others = _types(one, left), _types(other, right)
        return kinds is not None and others is not None and not kinds & others


COMBINING = ("allOf", "anyOf", "oneOf")
# Keywords by which a schema allows less than the type, the values or the reference that it has.
_NARROWING = frozenset(
    ("pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
     "multipleOf", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minItems", "maxItems",
     "uniqueItems", "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
     "required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "if",
     "then", "else", "not", "$ref", *COMBINING)
)  # fmt: skip


def own_names(schema: Schema) -> Names:
    """The keys that `schema` itself speaks of."""
    patterns = schema.get("patternProperties")
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties", False))
    keys = _once((*_properties(schema), *_required(schema)))
    return Names(keys, tuple(patterns) if isinstance(patterns, dict) else (), others is not False)


def parts_of(schema: Schema) -> Iterator[Any]:
    """The inline schemas that `schema` is combined from, without the target of a reference."""
    for key in COMBINING:
        parts = schema.get(key)
        if isinstance(parts, list):
            yield from parts


def _is_combined(schema: Schema) -> bool:
    return "$ref" in schema or any(key in schema for key in COMBINING)


def _properties(schema: Schema) -> Schema:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: Schema) -> dict[str, None]:
    """The required keys, as a set that keeps its order."""
    found = schema.get("required")
    return {name: None for name in found if isinstance(name, str)} if isinstance(found, list) else {}


def _once(keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(keys))


def _types(schema: Schema, values: dict[str, Any] | None) -> set[str] | None:
    """The types of the allowed values; None for any. An integer is a number."""
    if values is not None:
        return {_type_of(value) for value in values.values()}
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(kinds, list):
        return None
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _type_of(value: Any) -> str:
    types = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return types.get(type(value), "null")


def _has_type(value: Any, kind: Any) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return _type_of(value) == ("number" if kind == "integer" else kind)


def _key(value: Any) -> str:
    """Equal for values that are equal in JSON, where 1 and 1.0 are one number."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """`value` with integers for the floats in it that are whole."""
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
