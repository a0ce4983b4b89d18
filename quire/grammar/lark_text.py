"""Grammars that clients write: rules in llguidance's dialect of Lark, GBNF, and llguidance's own JSON."""

import json
import re
from typing import Any

from quire.errors import InvalidRequest, invalid, shown
from quire.grammar.closed_schema import guided_schema
from quire.grammar.gbnf import is_gbnf, lark_of_gbnf
from quire.grammar.limits import MAX_LITERAL, check_regex, check_size, refuse_schema_that_explodes
from quire.request import Grammar, GrammarKind, json_schema
from quire.text.json_text import parse_json_text

MAX_LARK_BYTES = 64 * 1024
_TOKEN = re.compile(
    r"""
      (?P<comment> //[^\n]* | \#[^\n]* )
    | (?P<string> "(?:[^"\\\n]|\\.)*" )
    | (?P<regex> /(?!/)(?:[^/\\]|\\.)+/[a-z]* )
    | (?P<special> <[^<>\s]+> )
    | (?P<json> %json\b )
    | (?P<option> \btemperature\s*= )
    | (?P<open> ["/] )
    | (?P<rest> [^/"\#<%t]+ | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_FLAGS = re.compile("[imslu]*")
_JSON = json.JSONDecoder()


def client_grammar(name: str, text: str) -> Grammar:
    """The grammar that the field `name` gives: rules in Lark or GBNF, or a document of llguidance with one of those or
    with a schema. Takes time linear in the text."""
    check_size(name, text, MAX_LARK_BYTES)
    if text.lstrip().startswith("{"):
        return _of_document(name, parse_json_text(name, text))
    try:
        return Grammar(GrammarKind.LARK, lark_of_gbnf(text) if is_gbnf(text) else _checked(name, text))
    except InvalidRequest as error:
        raise error if error.param else invalid(name, f"cannot be followed: {error.message}") from None


def embedded(rule: str, grammar: Grammar) -> str:
    """`grammar` as a rule of a larger grammar in Lark."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return f"{rule}: %json {json.dumps(guided_schema(json.loads(grammar.text)))}"
    if grammar.kind is GrammarKind.REGEX:
        return f"{rule}: {_regex_term(grammar.text)}"
    if grammar.kind is GrammarKind.LARK:
        return f"{rule}: %lark {{\n{grammar.text}\n}}"
    raise ValueError(f"a grammar of {grammar.kind} is no part of another")


def _regex_term(pattern: str) -> str:
    """A regular expression as a Lark terminal. Slashes and line ends are escaped."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"\\[\s\S]|[/\n]", lambda at: written.get(at[0], at[0]), pattern) + "/"


def _of_document(name: str, document: Any) -> Grammar:
    grammars = document.get("grammars") if isinstance(document, dict) else None
    if not isinstance(grammars, list) or len(grammars) != 1 or not isinstance(grammars[0], dict):
        raise invalid(name, "is JSON; it must be an object with one grammar in the list grammars")
    given = {key: value for key, value in grammars[0].items() if value is not None and key != "name"}
    if given.keys() == {"lark_grammar"} and isinstance(given["lark_grammar"], str):
        return client_grammar(f"{name}.grammars[0].lark_grammar", given["lark_grammar"])
    if given.keys() == {"json_schema"}:
        return json_schema(given["json_schema"])
    raise invalid(f"{name}.grammars[0]", f"is {shown(given)}; it must have lark_grammar, a text, or json_schema")


def _checked(name: str, text: str) -> str:
    """`text` with its schemas closed. Refuses grammars that expand too much, and features that would be ignored."""
    parts: list[str] = []
    at = num_repeated = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None, "any character is the rest of something"
        kind, part, at = found.lastgroup, found[0], found.end()
        if kind == "string" and len(part) > MAX_LITERAL:
            raise invalid(name, f"has a string of {len(part)} characters; the limit is {MAX_LITERAL}")
        if kind == "regex":
            pattern, _, flags = part[1:].rpartition("/")
            if not _FLAGS.fullmatch(flags):
                raise invalid(name, f"has an expression with the flags {flags[:20]!r}; they can be i, m, s, l and u")
            num_repeated += check_regex(name, pattern, num_repeated)
        elif kind == "open":
            what = "a string" if part == '"' else "an expression"
            raise invalid(name, f"has {what} that is not closed: {text[at - 1 : at + 19]!r}")
        elif kind == "special":
            raise invalid(name, f"has {part[:60]!r}; tokens of the model cannot be named")
        elif kind == "option":
            raise invalid(name, "sets a temperature; a rule cannot have one of its own")
        elif kind == "json":
            part, at = _schema(name, text, at)
        parts.append(part)
    return "".join(parts)


def _schema(name: str, text: str, at: int) -> tuple[str, int]:
    """The schema behind `%json`, and its end."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        schema, end = _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        raise invalid(name, "has a schema behind %json that is no JSON, or is nested too deeply") from None
    parse_json_text(name, text[at:end])  # its depth
    refuse_schema_that_explodes(name, schema)
    return f"%json {json.dumps(guided_schema(schema))}", end
