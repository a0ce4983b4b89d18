"""The grammar of answers that may call tools."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest, invalid
from quire.grammar.closed_schema import guided_schema
from quire.grammar.lark_text import embedded
from quire.request import Grammar, GrammarKind
from quire.text.tools import CallFormat, Tool

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_grammar(
    tools: Sequence[Tool],
    form: CallFormat,
    *,
    required: bool,
    parallel: bool,
    special: Mapping[str, int] | None = None,
    otherwise: Grammar | None = None,
) -> Grammar:
    """Answers that are calls, or where they are not `required`, text or calls; text may come before the first.

    `special`: marks of the form that are special tokens of the vocabulary, which no text spells. `otherwise`: in place
    of text, and not before calls.
    """
    marks = special or {}
    calls = "call"
    if parallel and form.between is not None:
        calls = f"call ({_terms(form.between, marks)} call)*"
    calls = f"{calls} {_terms(form.end, marks)}"
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        schema = json.dumps(_parameters(tool))
        rules.append(f'call_{index}: {_terms(form.opening(tool.name), {})} args_{index} "}}"')
        rules.append(f"args_{index}: %json {schema}")
    begin = _terms(form.begin, marks)
    if required:
        rules.append(f"start: {begin} {calls}")
    elif otherwise is not None:
        rules += [f"start: answer | {begin} {calls}", embedded("answer", otherwise)]
    elif not form.begin:
        rules += [f"start: TEXT | {calls}", "TEXT: /([^{](.|\\n)*)?/"]
    elif begin.startswith("<"):
        rules += [f"start: TEXT | TEXT {begin} {calls}", "TEXT: /(.|\\n)*/"]
    else:
        # A lazy rule ends as soon as it can: text goes on until calls begin, and from there on there is no way back.
        rules += [f"start: TEXT | before {calls}", f"before[lazy]: TEXT {begin}", "TEXT: /(.|\\n)*/"]
    return Grammar(GrammarKind.LARK, "\n".join(rules))


def _parameters(tool: Tool) -> Any:
    try:
        return guided_schema({"type": "object", **(tool.parameters or NO_PARAMETERS)})
    except InvalidRequest as error:
        raise invalid("tools", f"has {tool.name!r}, whose parameters cannot be followed: {error.message}") from None


def _terms(text: str, special: Mapping[str, int]) -> str:
    """`text` in a rule: quoted, its special tokens by number."""
    parts = [text]
    for mark in special:
        parts = [piece for part in parts for piece in re.split(f"({re.escape(mark)})", part)]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)
