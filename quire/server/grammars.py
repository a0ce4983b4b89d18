"""Grammars as the APIs write them."""

import json
from typing import Any

from quire.errors import InvalidRequest
from quire.request import Grammar, GrammarKind, json_schema, regex
from quire.server.validation import shown

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_TYPES = ("text", "json_object", "json_schema", "json", "regex")


def grammar_of(name: str, given: dict[str, Any] | None, *, needs_properties: bool = False) -> Grammar | None:
    """The grammar that the field `name` asks for, in OpenAI's words or in text-generation-inference's.

    `needs_properties`: of a schema, as that insists on.
    """
    grammar = _grammar(name, given)
    is_schema = grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    if grammar is not None and is_schema and needs_properties and "properties" not in json.loads(grammar.text):
        raise InvalidRequest(f"{name} has no properties at the top of its schema; it must have some")
    return grammar


def _grammar(name: str, given: dict[str, Any] | None) -> Grammar | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind not in _TYPES:
        raise InvalidRequest(f"{name}.type is {shown(kind)}; it can be {', '.join(_TYPES)}")
    if kind == "text":
        return None
    if kind == "regex":
        pattern = given.get("value")
        if not isinstance(pattern, str):
            raise InvalidRequest(f"{name}.value is {shown(pattern)}; it must be a regular expression")
        return regex(pattern)
    if kind == "json_schema":
        where = "json_schema" if "json_schema" in given else "value"
        described = given.get(where)
        if not isinstance(described, dict):
            raise InvalidRequest(f"{name}.{where} is {shown(described)}; it must be an object with a schema")
        return json_schema(_schema(f"{name}.{where}.schema", described.get("schema")))
    if "value" not in given and kind == "json_object":
        return json_schema(ANY_OBJECT)
    return json_schema(_schema(f"{name}.value", given.get("value")))


def _schema(name: str, given: Any) -> dict[str, Any]:
    if isinstance(given, str):  # as text-generation-inference takes it, too
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{name} is {shown(given)}; it must be a JSON schema") from None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name} is {shown(given)}; it must be a JSON schema")
    return given
