"""Parses the tools of a chat from OpenAI's fields."""

import re
from collections.abc import Sequence
from typing import Any

from quire.errors import invalid, shown
from quire.grammar.answers import CallRules
from quire.grammar.limits import MAX_BYTES, refuse_schema_that_explodes
from quire.request import GrammarKind
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.sampling import at_most
from quire.server.api.tool_use import ToolUse
from quire.server.service.generation_spec import NamedGrammar
from quire.server.service.served_model import ServedModel
from quire.text.custom_input import input_parameters
from quire.text.tools import Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def tool_use(fields: ChatRequest, model: ServedModel, constraint: NamedGrammar | None = None) -> ToolUse | None:
    """The tools of a request; None if none may be called. Answers without calls follow `constraint`."""
    given = fields.tools or []
    at_most("the number of tools", len(given), MAX_TOOLS, param="tools")
    tools = _tools(given)
    choice, allowed = _choice(fields.tool_choice)
    if not tools:
        if choice == "required":
            raise invalid("tool_choice", f"is {shown(fields.tool_choice)}; there are no tools")
        if fields.tool_prompt is not None:
            raise invalid("tool_prompt", f"is {shown(fields.tool_prompt)}; there are no tools")
        return None
    for name in allowed or ():
        if name not in tools:
            raise invalid("tool_choice", f"is {shown(name)}; the tools are {', '.join(tools)}")
    if choice == "none":
        return None
    if constraint is not None and constraint.grammar.kind is GrammarKind.TOKENS:
        raise invalid(constraint.field, "and tools are both set; an answer can follow one of them")
    is_named = allowed is not None and _kind(fields.tool_choice) != "allowed_tools"
    rules = CallRules(
        [tool for tool in tools.values() if allowed is None or tool.name in allowed],
        model.templates.select(with_tools=True).call_format,
        required=choice == "required",
        parallel=not is_named and fields.parallel_tool_calls is not False,
    )
    return ToolUse([_rendered(one, tool) for one, tool in zip(given, tools.values(), strict=True)], rules)


def _tools(given: Sequence[dict[str, Any]]) -> dict[str, Tool]:
    """The tools by name."""
    tools: dict[str, Tool] = {}
    size = 0
    for index, one in enumerate(given):
        tool = _tool(index, one)
        if tool.name in tools:
            raise invalid("tools", f"has two functions of one name, {tool.name!r}; each needs a name of its own")
        tools[tool.name] = tool
        where = "custom.format" if tool.is_custom else "function.parameters"
        size += refuse_schema_that_explodes(f"tools[{index}].{where}", tool.parameters)
        if size > MAX_BYTES:
            raise invalid(
                f"tools[{index}].function.parameters",
                f"brings the schemas of all tools to {size} bytes; the limit is {MAX_BYTES}",
            )
    return tools


def _tool(index: int, given: dict[str, Any]) -> Tool:
    where, kind = f"tools[{index}]", given.get("type", "function")
    if kind not in ("function", "custom"):
        raise invalid(f"{where}.type", f"is {shown(kind)}; it must be 'function' or 'custom'")
    function = given.get(kind)
    if not isinstance(function, dict):
        raise invalid(f"{where}.{kind}", f"is {shown(function)}; it must be an object")
    name, parameters, strict = (function.get(key) for key in ("name", "parameters", "strict"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.{kind}.name", f"is {shown(name)}; it must match {_NAME.pattern}")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{where}.{kind}.description", f"is {shown(description)}; it must be a string")
    if kind == "custom":
        pattern = _custom_pattern(f"{where}.custom.format", function.get("format"))
        return Tool(name, input_parameters(pattern), strict=pattern is not None, is_custom=True)
    if parameters is None:
        parameters = function.get("arguments")  # as text-generation-inference calls it, too
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.function.parameters", f"is {shown(parameters)}; it must be a JSON schema")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{where}.function.strict", f"is {shown(strict)}; it must be true or false")
    return Tool(name, parameters or {}, strict=strict is True)


def _custom_pattern(where: str, given: Any) -> str | None:
    """The regular expression that the input of a custom tool must match; None: any text."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else given
    if kind == "text":
        return None
    if kind != "grammar":
        raise invalid(f"{where}.type", f"is {shown(kind)}; it can be text or grammar")
    grammar = given.get("grammar", given)
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if syntax != "regex" or not isinstance(definition, str):
        problem = "the input of a custom tool can follow a regular expression, and no other grammar"
        raise invalid(f"{where}.grammar.syntax", f"is {shown(syntax)}; {problem}")
    return definition


def _rendered(given: dict[str, Any], tool: Tool) -> dict[str, Any]:
    """The tool as templates expect it, with the fields that OpenAI makes optional. A custom tool becomes a function."""
    if tool.is_custom:
        described = given["custom"].get("description") or ""
        function = {"name": tool.name, "description": described, "parameters": tool.parameters}
        return {"type": "function", "function": function}
    defaults = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": defaults | {k: v for k, v in given["function"].items() if v is not None}}


def _kind(given: Any) -> str:
    kind = given.get("type", "function") if isinstance(given, dict) else "function"
    return kind if isinstance(kind, str) else ""


def _choice(given: str | dict[str, Any] | None) -> tuple[str, list[str] | None]:
    """none, auto or required; and the functions that may be called, where not all may."""
    if given is None:
        return "auto", None
    if isinstance(given, str):
        return (given, None) if given in ("none", "auto", "required") else ("required", [given])
    if _kind(given) != "allowed_tools":
        return "required", [_named("tool_choice", given)]
    allowed = given.get("allowed_tools", given)
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(tools, list) or not tools:
        raise invalid("tool_choice.allowed_tools.tools", f"is {shown(tools)}; it must be a list of tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.allowed_tools.mode", f"is {shown(mode)}; it can be auto or required")
    return mode, [_named(f"tool_choice.allowed_tools.tools[{index}]", one) for index, one in enumerate(tools)]


def _named(where: str, given: Any) -> str:
    kind = _kind(given)
    inner = given.get(kind) if isinstance(given, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if kind not in ("function", "custom") or not isinstance(name, str):
        forms = "none, auto, required, {...}, or an object with allowed_tools" if where == "tool_choice" else "{...}"
        written = '{"type": "function", "function": {"name": ...}}'
        raise invalid(where, f"is {shown(given)}; it can be {forms.replace('{...}', written)}")
    return name
