"""Grammars as the APIs write them."""

from dataclasses import replace
from typing import Any

from quire.errors import invalid, shown
from quire.grammar.limits import MAX_BYTES
from quire.request import Grammar, json_schema, regex
from quire.server.service.generation_spec import GenerationSpec, NamedGrammar
from quire.server.settings import ServerSettings
from quire.text.json_text import parse_json_text

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_TYPES = ("text", "json_object", "json_schema", "json", "regex")


def with_grammar(
    settings: ServerSettings, spec: GenerationSpec, field: str, grammar: Grammar | None, checked: Grammar | None = None
) -> GenerationSpec:
    """`spec` with the grammar that `field` gives. `checked` replaces a grammar with special tokens in the check, which
    does not know them."""
    if grammar is None:
        return spec
    request = spec.request
    if settings.disable_grammar_support:
        raise invalid(field, "is set; this server was started with --disable-grammar-support")
    if not request.end_ids:
        raise invalid(field, "is set; the model has no end-of-sequence token to end such an answer with")
    if request.ignore_end:
        raise invalid("ignore_eos", f"is true; with {field} an answer ends where its grammar does")
    if request.min_tokens:
        raise invalid(
            "min_tokens",
            f"is {request.min_tokens}; with {field} an answer ends where its grammar does, so it must be 0",
        )
    return replace(
        spec, request=replace(request, grammar=grammar), unchecked_grammar=NamedGrammar(field, checked or grammar)
    )


def grammar_of(name: str, given: dict[str, Any] | None, *, needs_properties: bool = False) -> Grammar | None:
    """The grammar that the field `name` gives, in the form of OpenAI or of text-generation-inference.

    `needs_properties`: a schema must have some at its top.
    """
    if given is None:
        return None
    kind = given.get("type")
    if kind not in _TYPES:
        raise invalid(f"{name}.type", f"is {shown(kind)}; it can be {', '.join(_TYPES)}")
    if kind == "text":
        return None
    if kind == "regex":
        pattern = given.get("value")
        if not isinstance(pattern, str):
            raise invalid(f"{name}.value", f"is {shown(pattern)}; it must be a regular expression")
        return regex(pattern)
    schema = _schema_of(name, kind, given)
    if needs_properties and "properties" not in schema:
        raise invalid(name, "has no properties at the top of its schema; it must have some")
    return json_schema(schema)


def _schema_of(name: str, kind: str, given: dict[str, Any]) -> dict[str, Any]:
    if kind == "json_schema":
        where = "json_schema" if "json_schema" in given else "value"
        described = given.get(where)
        if not isinstance(described, dict):
            raise invalid(f"{name}.{where}", f"is {shown(described)}; it must be an object with a schema")
        return _schema(f"{name}.{where}.schema", described.get("schema"))
    if "value" not in given and kind == "json_object":
        return ANY_OBJECT
    return _schema(f"{name}.value", given.get("value"))


def _schema(name: str, given: Any) -> dict[str, Any]:
    if isinstance(given, str):  # text-generation-inference takes JSON text as well
        if len(given) > MAX_BYTES:
            raise invalid(name, f"has {len(given)} characters; the limit is {MAX_BYTES} bytes")
        given = parse_json_text(name, given)
    if not isinstance(given, dict):
        raise invalid(name, f"is {shown(given)}; it must be a JSON schema")
    return given
