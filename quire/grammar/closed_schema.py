"""JSON schemas as answers follow them: closed unless they say otherwise, in the keywords that llguidance has."""

from itertools import combinations
from typing import Any

from quire.errors import InvalidRequest, shown
from quire.grammar.schema_facts import COMBINING, Names, Schema, SchemaFacts, own_names
from quire.grammar.schema_numbers import exact_numbers

# Whitespace between the parts of JSON: a line end and some indentation, but not an endless run.
WHITESPACE = r"\n?[ ]{0,16}"
STYLE = "x-guidance"  # the library's key for how JSON is written
STYLE_PATTERNS = ("whitespace_pattern", "item_separator", "key_separator")  # what a schema may say of it
MAX_UNIQUE, MAX_UNIQUE_CHARACTERS = 8, 200  # values in a set that is written out
# Every other format is an annotation, as JSON Schema has it.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("prefixItems", "items", *COMBINING)
_SINGLE = ("items", "additionalItems", "additionalProperties")
_OTHER_KINDS = frozenset(("type", "const", "enum", "$ref", "anyOf", "oneOf"))  # what may say that it is no object
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")


def guided_schema(schema: Any, strict: bool = True) -> Any:
    """`schema` as a grammar follows it, for the library.

    - An object with `properties` has no others, unless `additionalProperties`, `unevaluatedProperties` or
      `patternProperties` says so. Schemas that are put together by `allOf`, `anyOf`, `oneOf` or `$ref` are closed
      together: each lets the keys of the others pass.
    - `oneOf` is done where no answer fits two of its schemas, `uniqueItems` where the items are few known values (they
      come in the schema's order), `propertyNames` where it lists names or is a pattern, `unevaluatedProperties` where
      no choice decides what is evaluated.
    - The property of a `discriminator` is required. Blanks are bounded. `properties` at the top without a type are
      those of an object.

    Raises InvalidRequest for what cannot be done and would be lost, and the library refuses other keywords it lacks,
    unless it need not be `strict`: then answers follow the rest of the schema.
    """
    if not isinstance(schema, dict):
        return schema
    if "properties" in schema and not schema.keys() & _OTHER_KINDS:
        schema = {"type": "object"} | schema
    try:
        closed = _Closing(schema, strict).closed()
    except RecursionError:
        raise InvalidRequest("the schema is too complex: too many references follow each other") from None
    return closed | {STYLE: _style(schema.get(STYLE)) | {"lenient": not strict}}


def _style(given: Any) -> dict[str, Any]:
    """The notation of JSON: as `given`, a part of the schema, says, but for what would let answers break the schema."""
    given = given if isinstance(given, dict) else {}
    blanks = "" if given.get("whitespace_flexible") is False else WHITESPACE
    style = {key: given[key] for key in STYLE_PATTERNS if isinstance(given.get(key), str)}
    return {"whitespace_pattern": blanks} | style


class _Closing:
    """Rewrites one document. Paths stay the same, so that references still resolve."""

    def __init__(self, root: Schema, strict: bool) -> None:
        self._root = root
        self._strict = strict
        self._facts = SchemaFacts(root)
        self._variants: dict[tuple[str, Names], str] = {}  # names of definitions that let other keys pass
        self._definitions: Schema = {}

    def closed(self) -> Schema:
        done = self._schema(self._root, Names(), "")
        assert isinstance(done, dict)
        if self._definitions:
            known = done.get("$defs", {})
            if not isinstance(known, dict):
                raise InvalidRequest(f"$defs is {shown(known)}; it must be an object")
            done["$defs"] = known | self._definitions
        return done

    def _schema(self, schema: Any, siblings: Names, place: str) -> Any:
        """`schema`, closed except for the keys that its `siblings` name."""
        if not isinstance(schema, dict):
            return schema
        facts = self._facts
        facts.count()
        schema = self._rewritten(schema, siblings, place)
        done = {key: self._value(key, value, place) for key, value in schema.items() if key not in COMBINING}
        parts = self._parts(schema)
        own = own_names(schema)
        for key in parts:
            around = facts.union([own, siblings, *(names for other, names in parts.items() if other != key)])
            done[key] = self._combined(key, schema, around, place)
        self._close(schema, done, facts.union([own, *parts.values(), siblings]))
        return {key: done[key] for key in (*schema, *done) if key in done}  # in the order of the schema

    def _parts(self, schema: Schema) -> dict[str, Names]:
        """The keys of the schemas that each keyword combines with this one."""
        parts: dict[str, Names] = {}
        if "$ref" in schema:
            parts["$ref"] = self._facts.target_names(schema)
        for key in COMBINING:
            if isinstance(schema.get(key), list):
                parts[key] = self._facts.union(map(self._facts.names, schema[key]))
        return parts

    def _combined(self, key: str, schema: Schema, around: Names, place: str) -> Any:
        """The value of a keyword that combines schemas; `around` has the keys of the schemas next to it."""
        value = schema[key]
        if key == "$ref":
            return self._reference(schema, around, place)
        names = [self._facts.names(one) for one in value] if key == "allOf" else []
        done = []
        for index, one in enumerate(value):
            siblings = self._facts.union([around, *names[:index], *names[index + 1 :]])
            done.append(self._schema(one, siblings, f"{place}{key}[{index}]."))
        return done

    def _reference(self, schema: Schema, around: Names, place: str) -> str:
        """A reference to the target, or to a copy of it that lets the keys around it pass."""
        reference = schema["$ref"]
        target = self._facts.target(schema)
        if target is None or not (around.keys or around.patterns or around.is_open):
            return str(reference)
        name = self._variants.get((reference, around))
        if name is None:
            name = f"closed-{len(self._variants)}"
            while isinstance(known := self._root.get("$defs"), dict) and name in known:
                name += "-"
            self._variants[reference, around] = name
            self._definitions[name] = self._schema(target, around, place)
        return f"#/$defs/{name}"

    def _close(self, schema: Schema, done: Schema, others: Names) -> None:
        """Let `done` have its keys and those of the schemas around it, and no more if it lists its own."""
        is_said = "additionalProperties" in schema
        if is_said or not isinstance(schema.get("properties"), dict) or others.is_open:
            return
        done["properties"] |= {key: True for key in others.keys if key not in done["properties"]}
        if others.patterns:
            known = done.get("patternProperties", {})
            done["patternProperties"] = known | {key: True for key in others.patterns if key not in known}
        done["additionalProperties"] = False

    def _value(self, key: str, value: Any, place: str) -> Any:
        """The value of a keyword, the schemas in it closed by themselves."""
        if key in _BY_NAME and isinstance(value, dict):
            return {name: self._schema(one, Names(), f"{place}{key}.{name}.") for name, one in value.items()}
        if key in _IN_LISTS and isinstance(value, list):
            return [self._schema(one, Names(), f"{place}{key}[{index}].") for index, one in enumerate(value)]
        if key in _SINGLE:
            return self._schema(value, Names(), f"{place}{key}.")
        return value

    # Keywords that the library lacks

    def _rewritten(self, schema: Schema, siblings: Names, place: str) -> Schema:
        done = dict(schema)
        if isinstance(done.get("format"), str) and done["format"] not in FORMATS:
            del done["format"]
        if not self._strict and _looks_around(done.get("pattern")):
            del done["pattern"]
        if "uniqueItems" in done:
            done = self._without_unique_items(done, place)
        if "propertyNames" in done:
            done = self._without_property_names(done)
        if "unevaluatedProperties" in done:
            done = self._without_unevaluated(done, place)
        if isinstance(done.get("discriminator"), dict) and isinstance(done["discriminator"].get("propertyName"), str):
            done["required"] = [*_list_at(done, "required", place), done["discriminator"]["propertyName"]]
        if isinstance(done.get("anyOf"), list):
            done["anyOf"] = _without_look_around(done["anyOf"])
        if isinstance(done.get("oneOf"), list):
            one_of = done.pop("oneOf")
            around = self._facts.union([own_names(done), siblings, *self._parts(done).values()])
            self._refuse_overlaps(one_of, around, place)
            if "anyOf" in done:
                done["allOf"] = [*_list_at(done, "allOf", place), {"anyOf": one_of}]
            else:
                done["anyOf"] = one_of
        return exact_numbers(done, place, self._strict)  # last, as sets are written out by then

    def _refuse_overlaps(self, parts: list[Any], around: Names, place: str) -> None:
        for (index, one), (other_index, other) in combinations(enumerate(parts), 2):
            if self._strict and not self._facts.are_exclusive(one, other, around):
                raise InvalidRequest(
                    f"{place}oneOf[{index}] and [{other_index}] may both fit an answer, and oneOf allows one; "
                    "give them different types, or a required property with different constants, or write anyOf"
                )

    def _without_unique_items(self, schema: Schema, place: str) -> Schema:
        unique = schema.pop("uniqueItems")
        most, kinds = schema.get("maxItems"), schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if unique is False or (isinstance(most, int) and most <= 1) or (kinds and "array" not in kinds):
            return schema
        values = None if "prefixItems" in schema else self._facts.values(schema.get("items"))
        can_list = kinds in (["array"], ["array", "null"], ["null", "array"])
        if unique is not True or not can_list or values is None or not _are_few(values):
            if not self._strict:
                return schema
            raise InvalidRequest(
                f"{place}uniqueItems is {str(unique)[:40]}; it can be kept only where type is array, or array "
                f"and null, and items has an enum of at most {MAX_UNIQUE} values, of {MAX_UNIQUE_CHARACTERS} "
                "characters in all"
            )
        least, most = schema.pop("minItems", 0), schema.pop("maxItems", len(values))
        if not (isinstance(least, int) and isinstance(most, int)):
            raise InvalidRequest(f"{place}minItems and maxItems must be integers")
        sizes = range(max(least, 0), min(most, len(values)) + 1)
        sets: list[Any] = [list(chosen) for size in sizes for chosen in combinations(values, size)]
        sets += [None] * ("null" in kinds)
        rest = {key: value for key, value in schema.items() if key != "items"}
        if "enum" in rest:
            return rest | {"allOf": [*_list_at(rest, "allOf", place), {"enum": sets}]}
        return rest | {"enum": sets}

    def _without_property_names(self, schema: Schema) -> Schema:
        """Names that are listed become properties, a pattern becomes one of `patternProperties`."""
        names = self._facts.resolved(schema["propertyNames"])
        if "properties" in schema or "patternProperties" in schema or not isinstance(names, dict):
            return schema  # refused by the library
        others = schema.get("additionalProperties", True)
        rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
        listed = self._facts.values(names)
        if listed is not None:
            keys = [name for name in listed if isinstance(name, str)]
            return rest | {"properties": dict.fromkeys(keys, others), "additionalProperties": False}
        said = names.keys() - {"title", "description"} - ({"type"} if names.get("type") == "string" else set())
        if said == {"pattern"} and isinstance(names["pattern"], str):
            return rest | {"patternProperties": {names["pattern"]: others}, "additionalProperties": False}
        return schema if said else rest | {"additionalProperties": others}

    def _without_unevaluated(self, schema: Schema, place: str) -> Schema:
        """Replace `unevaluatedProperties` by `additionalProperties` of this schema and those it is combined with."""
        value = schema.pop("unevaluatedProperties")
        if value is True or "additionalProperties" in schema:
            return schema | ({"additionalProperties": True} if "additionalProperties" not in schema else {})
        if value is not False or "anyOf" in schema or "oneOf" in schema or self._names_choices(schema):
            if not self._strict:
                return schema
            raise InvalidRequest(
                f"{place}unevaluatedProperties is {str(value)[:40]}; it can be kept only as true, or as false where "
                "neither anyOf nor oneOf decides what is evaluated"
            )
        return schema | {"properties": schema.get("properties", {})}

    def _names_choices(self, schema: Any, depth: int = 0) -> bool:
        """True if a choice is among the schemas that `schema` is put together of."""
        self._facts.count()
        if not isinstance(schema, dict) or depth > 32:
            return depth > 32
        if "anyOf" in schema or "oneOf" in schema:
            return True
        parts = [*schema.get("allOf", [])] if isinstance(schema.get("allOf", []), list) else []
        if "$ref" in schema:
            parts.append(self._facts.target(schema))
        return any(self._names_choices(part, depth + 1) for part in parts)


def _list_at(schema: Schema, key: str, place: str) -> list[Any]:
    found = schema.get(key, [])
    if not isinstance(found, list):
        raise InvalidRequest(f"{place}{key} is {shown(found)}; it must be a list")
    return found


def _are_few(values: list[Any]) -> bool:
    return len(values) <= MAX_UNIQUE and len(str(values)) <= MAX_UNIQUE_CHARACTERS


def _looks_around(pattern: Any) -> bool:
    """True if `pattern` looks ahead or behind, which cannot be followed."""
    unescaped = str(pattern).replace(r"\\", "-").replace(r"\(", "-")
    return any(begin in unescaped for begin in _LOOK_AROUND)


def _without_look_around(parts: list[Any]) -> list[Any]:
    """Drop alternatives with patterns that cannot be followed, as of decimal numbers, if others remain."""
    kept = [one for one in parts if not (isinstance(one, dict) and _looks_around(one.get("pattern")))]
    return kept or parts
