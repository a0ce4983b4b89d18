"""Tools in a chat: OpenAI's fields to what the model may call."""

import re
from collections.abc import Sequence
from typing import Any

from quire.errors import invalid, shown
from quire.grammar.limits import MAX_BYTES, refuse_schema_that_explodes
from quire.request import GrammarKind
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.sampling import at_most
from quire.server.api.tool_use import ToolUse, use_of_tools
from quire.server.service.generation_spec import NamedGrammar
from quire.server.service.served_model import ServedModel
from quire.text.tools import Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def tool_use(fields: ChatRequest, model: ServedModel, constraint: NamedGrammar | None = None) -> ToolUse | None:
    """None when no tool may be called. Answers that are no calls follow `constraint`."""
    given = fields.tools or []
    at_most("the number of tools", len(given), MAX_TOOLS, param="tools")
    tools = _tools(given)
    choice, named = _choice(fields.tool_choice)
    if not tools:
        if choice == "required":
            raise invalid("tool_choice", f"is {shown(fields.tool_choice)}; there are no tools")
        if fields.tool_prompt is not None:
            raise invalid("tool_prompt", f"is {shown(fields.tool_prompt)}; there are no tools")
        return None
    if named is not None and named not in tools:
        raise invalid("tool_choice", f"is {shown(named)}; the tools are {', '.join(tools)}")
    if choice == "none":
        return None
    if constraint is not None and constraint.grammar.kind is GrammarKind.TOKENS:
        raise invalid(constraint.field, "and tools are both set; an answer can follow one of them")
    return use_of_tools(
        model,
        [_rendered(one) for one in given],
        list(tools.values()) if named is None else [tools[named]],
        required=choice == "required",
        parallel=named is None and fields.parallel_tool_calls is not False,
    )


def _tools(given: Sequence[dict[str, Any]]) -> dict[str, Tool]:
    """The tools by name."""
    tools: dict[str, Tool] = {}
    size = 0
    for index, one in enumerate(given):
        tool = _tool(index, one)
        if tool.name in tools:
            raise invalid("tools", f"has two functions of one name, {tool.name!r}; each needs a name of its own")
        tools[tool.name] = tool
        size += refuse_schema_that_explodes(f"tools[{index}].function.parameters", tool.parameters)
        if size > MAX_BYTES:
            raise invalid(
                f"tools[{index}].function.parameters",
                f"brings the schemas of all tools to {size} bytes; the limit is {MAX_BYTES}",
            )
    return tools


def _tool(index: int, given: dict[str, Any]) -> Tool:
    where = f"tools[{index}]"
    if given.get("type", "function") != "function":
        raise invalid(f"{where}.type", f"is {shown(given['type'])}; it must be 'function'")
    function = given.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", f"is {shown(function)}; it must be an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"{where}.function.name", f"is {shown(name)}; it must match {_NAME.pattern}")
    if parameters is None:
        parameters = function.get("arguments")  # as text-generation-inference calls it, too
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.function.parameters", f"is {shown(parameters)}; it must be a JSON schema")
    return Tool(name, parameters or {}, strict=function.get("strict") is True)


def _rendered(given: dict[str, Any]) -> dict[str, Any]:
    """As templates expect it: with every part that OpenAI lets out."""
    function = given["function"]
    defaults = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": defaults | {k: v for k, v in function.items() if v is not None}}


def _choice(given: str | dict[str, Any] | None) -> tuple[str, str | None]:
    """none, auto or required; and the one function that is required."""
    if given is None:
        return "auto", None
    if isinstance(given, str):
        return (given, None) if given in ("none", "auto", "required") else ("required", given)
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type", "function") != "function" or not isinstance(name, str):
        raise invalid(
            "tool_choice",
            f"is {shown(given)}; it can be none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}',
        )
    return "required", name
