"""Tools in a chat: OpenAI's fields to what the model may call, and answers to OpenAI's calls."""

import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from quire.errors import invalid, shown
from quire.grammar.limits import MAX_BYTES, refuse_schema_that_explodes
from quire.request import FinishReason as Finish
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.openai.responses import (
    FinishReason,
    FunctionCall,
    MessageContent,
    MessagePart,
    ToolCall,
    ToolCallPart,
)
from quire.server.api.sampling import at_most
from quire.server.api.tool_use import ToolUse, use_of_tools
from quire.server.service.served_model import ServedModel
from quire.text.call_parser import CallBegins, CallParser, Piece
from quire.text.tools import CallFormat, Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ID_CHARACTERS = string.ascii_letters + string.digits


def tool_use(fields: ChatRequest, model: ServedModel) -> ToolUse | None:
    """None when no tool may be called."""
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
    return use_of_tools(
        model,
        [_rendered(one) for one in given],
        list(tools.values()) if named is None else [tools[named]],
        required=choice == "required",
        parallel=named is None and fields.parallel_tool_calls is not False,
    )


class Calls:
    """The calls of one answer, as OpenAI writes them."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._parser = CallParser(form)

    def finish_reason(self, finish: Finish, otherwise: FinishReason) -> FinishReason:
        """Calls are a reason of their own, unless the answer was cut."""
        return "tool_calls" if self._parser.num_calls and finish is not Finish.LENGTH else otherwise

    def deltas(self, text: str, *, is_last: bool) -> list[MessagePart]:
        """The `delta`s of chunks, one after the other."""
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.flush()
        return [self._delta(piece) for piece in pieces]

    def message(self, text: str) -> MessageContent:
        """The content and the calls of a whole answer's `message`."""
        content: list[str] = []
        calls: list[ToolCall] = []
        for delta in self.deltas(text, is_last=True):
            if "content" in delta:
                content.append(delta["content"])
                continue
            (call,) = delta["tool_calls"]
            function = call["function"]
            if "id" in call and "name" in function:
                whole: FunctionCall = {"name": function["name"], "arguments": function["arguments"]}
                calls.append({"id": call["id"], "type": "function", "function": whole})
            else:
                calls[-1]["function"]["arguments"] += function["arguments"]
        if not calls:
            return {"content": "".join(content)}
        return {"content": "".join(content) or None, "tool_calls": calls}

    def _delta(self, piece: Piece) -> MessagePart:
        if isinstance(piece, str):
            return {"content": piece}
        if not isinstance(piece, CallBegins):
            return {"tool_calls": [{"index": piece.number, "function": {"arguments": piece.text}}]}
        begun: ToolCallPart = {
            "index": piece.number,
            "id": self._new_id(),
            "type": "function",
            "function": {"name": piece.name, "arguments": ""},
        }
        return {"tool_calls": [begun]}

    def _new_id(self) -> str:
        prefix = "call_" if self._form.id_length > 9 else ""
        return prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self._form.id_length))


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
    return Tool(name, parameters or {})


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
