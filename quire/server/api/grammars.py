"""Grammars as the APIs write them."""

from dataclasses import replace
from typing import Any

from quire.errors import invalid, shown
from quire.grammar.lark_text import client_grammar
from quire.grammar.limits import MAX_BYTES
from quire.request import Grammar, GrammarKind, json_schema, regex
from quire.server.service.generation_spec import GenerationSpec, NamedGrammar
from quire.server.settings import ServerSettings
from quire.text.json_text import parse_json_text

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# By type: the keys that may hold the constraint: those of OpenAI, text-generation-inference and other servers.
_KEYS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("value", "schema"),
    "json_schema": ("json_schema", "value", "schema"),
    "json": ("value", "schema"),
    "regex": ("value", "regex", "pattern"),
    "grammar": ("value", "grammar"),
}
_CONSTRAINTS = ("json_schema", "schema", "value", "regex", "pattern", "grammar", "structures", "triggers")
_NOUNS = {"regex": "regular expression", "grammar": "grammar, as a text"}


def with_grammar(
    settings: ServerSettings, spec: GenerationSpec, constraint: NamedGrammar | None, checked: Grammar | None = None
) -> GenerationSpec:
    """`spec` with the grammar of a field. `checked` replaces a grammar with special tokens in the check, which
    does not know them."""
    if constraint is None:
        return spec
    field, grammar, part = constraint
    request = spec.request
    if grammar.kind is GrammarKind.TOKENS:  # nothing to compile, and no rule about where the answer ends
        return replace(spec, request=replace(request, grammar=grammar))
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
    unchecked = NamedGrammar(field, checked or grammar, part)
    return replace(spec, request=replace(request, grammar=grammar), unchecked_grammar=unchecked)


def grammar_of(
    name: str, given: dict[str, Any] | None, *, needs_properties: bool = False, is_openai: bool = False
) -> Grammar | None:
    """The grammar that the field `name` gives, in the form of OpenAI or of text-generation-inference.

    `needs_properties`: a schema must have some at its top. `is_openai`: the field is OpenAI's, so that a schema which
    is missing is missing where OpenAI has it.
    """
    if given is None:
        return None
    kind: Any = given.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise invalid(f"{name}.type", f"is {shown(kind)}; it can be {', '.join(_KEYS)}")
    said = [key for key in _CONSTRAINTS if given.get(key) is not None]
    for key in said:
        if key not in _KEYS[kind]:
            raise invalid(f"{name}.{key}", f"is set; with type {kind} it can have {', '.join(_KEYS[kind]) or 'none'}")
    if len(said) > 1:
        raise invalid(f"{name}.{said[0]}", f"and {name}.{said[1]} are both set; an answer can follow one of them")
    if kind == "text":
        return None
    if kind in ("regex", "grammar"):
        key = said[0] if said else "value"
        text = given.get(key)
        if not isinstance(text, str):
            raise invalid(f"{name}.{key}", f"is {shown(text)}; it must be a {_NOUNS[kind]}")
        return regex(text) if kind == "regex" else client_grammar(f"{name}.{key}", text)
    missing = "json_schema" if is_openai and kind == "json_schema" else "value"
    schema = _schema_of(name, kind, given, said[0] if said else missing)
    if needs_properties and "properties" not in schema:
        raise invalid(name, "has no properties at the top of its schema; it must have some")
    return json_schema(ANY_OBJECT | schema if kind == "json_object" else schema)


def _schema_of(name: str, kind: str, given: dict[str, Any], key: str) -> dict[str, Any]:
    if kind == "json_object" and given.get(key) is None:
        return ANY_OBJECT
    if kind == "json_schema" and key != "schema":
        described = given.get(key)
        if not isinstance(described, dict):
            raise invalid(f"{name}.{key}", f"is {shown(described)}; it must be an object with a schema")
        return schema_given(f"{name}.{key}.schema", described.get("schema"))
    return schema_given(f"{name}.{key}", given.get(key))


def schema_given(name: str, given: Any) -> dict[str, Any]:
    """The schema that the field `name` gives, as JSON or as its text."""
    if isinstance(given, str):
        if len(given) > MAX_BYTES:
            raise invalid(name, f"has {len(given)} characters; the limit is {MAX_BYTES} bytes")
        given = parse_json_text(name, given)
    if not isinstance(given, dict):
        raise invalid(name, f"is {shown(given)}; it must be a JSON schema")
    return given
