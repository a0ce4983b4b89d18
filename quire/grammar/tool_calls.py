"""The grammar of calls, in the formats of model families."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import InvalidRequest, invalid
from quire.grammar.arguments import ArgumentRules
from quire.grammar.closed_schema import guided_schema
from quire.grammar.lark import Marks, terms
from quire.grammar.references import moved
from quire.text.tools import CallFormat, CallStyle, Tool

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_rules(
    tools: Sequence[Tool], form: CallFormat, marks: Marks, *, parallel: bool, is_whole: bool = False
) -> list[str]:
    """Rules for `calls`: one call or several, and the end of them. `begin` of the form stands before.

    `is_whole`: calls in JSON are JSON as a whole, so that they can be distinguished from other JSON.
    """
    calls = "call"
    if parallel and form.between is not None:
        calls = f"call ({terms(form.between, marks)} call)*"
    rules = [f"calls: {calls} {terms(form.end, marks)}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    write = _whole_call if is_whole and form.style is CallStyle.JSON else _WRITERS[form.style]
    for index, tool in enumerate(tools):
        try:
            rules += write(index, tool, form, marks)
        except InvalidRequest as error:
            raise invalid("tools", f"has {tool.name!r}: its parameters cannot be followed: {error.message}") from None
    return rules


def _json_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    return _around(index, tool, terms(form.opening(tool.name), {}), '"}"')


def _named_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    return _around(index, tool, terms(f"{tool.name}[ARGS]", marks), "")


def _section_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    after_name = "\n```json\n" if form.fenced else form.marks[2]
    return _around(index, tool, terms(tool.name + after_name, marks), "")


def _around(index: int, tool: Tool, before: str, after: str) -> list[str]:
    """A call with a JSON object of arguments."""
    schema = json.dumps(guided_schema(_parameters(tool), tool.strict))
    return [f"call_{index}: {before} args_{index} {after}", f"args_{index}: %json {schema}"]


def _whole_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    """A call that is one JSON object."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            form.arguments: moved(_parameters(tool), f"#/properties/{form.arguments}"),
        },
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }
    return [f"call_{index}: %json {json.dumps(guided_schema(schema, tool.strict))}"]


def _tagged_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    arguments = ArgumentRules(f"arg_{index}", tool, _parameters(tool), marks)
    items = [
        arguments.text_item(terms(f"<parameter={key}>\n", marks), key, "\n</parameter>\n") for key in arguments.keys
    ]
    before, after = terms(f"<function={tool.name}>\n", marks), terms("</function>", marks)
    return [f"call_{index}: {before} {arguments.one_by_one(items)} {after}", *arguments.rules]


def _keyed_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    arguments = ArgumentRules(f"arg_{index}", tool, _parameters(tool), marks)
    items = [
        arguments.text_item(
            terms(f"<arg_key>{key}</arg_key>\n<arg_value>", marks), key, "</arg_value>", terms("\n", {})
        )
        for key in arguments.keys
    ]
    name = terms(f"{tool.name}\n", {})
    return [f"call_{index}: {name} {arguments.one_by_one(items)}", *arguments.rules]


def _python_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    arguments = ArgumentRules(f"arg_{index}", tool, _parameters(tool), marks)
    items = [f"{terms(f'{key}=', {})} {arguments.json_value(key)}" for key in arguments.keys]
    name = terms(f"{tool.name}(", {})
    return [f'call_{index}: {name} {arguments.separated(items, ", ")} ")"', *arguments.rules]


def _marked_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    arguments = ArgumentRules(f"arg_{index}", tool, _parameters(tool), marks)
    items = [f"{terms(f'{key}:', {})} {arguments.marked_value(key, form.quote)}" for key in arguments.keys]
    name = terms(f"call:{tool.name}{{", {})
    return [f'call_{index}: {name} {arguments.separated(items, ",")} "}}"', *arguments.rules]


def _channel_call(index: int, tool: Tool, form: CallFormat, marks: Marks) -> list[str]:
    return _around(index, tool, terms(f"{tool.name} <|constrain|>json<|message|>", marks), "")


_WRITERS: dict[CallStyle, Callable[[int, Tool, CallFormat, Marks], list[str]]] = {
    CallStyle.JSON: _json_call,
    CallStyle.NAMED: _named_call,
    CallStyle.SECTIONS: _section_call,
    CallStyle.TAGS: _tagged_call,
    CallStyle.KEYS: _keyed_call,
    CallStyle.PYTHON: _python_call,
    CallStyle.MARKED: _marked_call,
    CallStyle.CHANNELS: _channel_call,
}


def _parameters(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.parameters or NO_PARAMETERS)}
