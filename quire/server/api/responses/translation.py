"""A request for a response as a request for a chat completion."""

from typing import Any

from quire.errors import invalid, shown
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.responses.requests import LOGPROBS, SAME_IN_CHATS, ResponseRequest
from quire.server.api.sampling import at_most, between
from quire.server.api.validation import MAX_NAME, Refusal

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_PROGRAMS = "tools are called by the model itself"
_TOOL_REFUSALS = {
    "allowed_callers": Refusal(_PROGRAMS, (["direct"], [])),
    "async": Refusal("calls are answered in order", (False,)),
    "defer_loading": Refusal("all tools are loaded", (False,)),
    "output_schema": Refusal(_PROGRAMS),
}
_TOOL_KEYS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}


def chat_request(fields: ResponseRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    _check(fields)
    has_logprobs = LOGPROBS in (fields.include or [])
    text = fields.text
    return ChatRequest(
        messages=messages,
        max_completion_tokens=fields.max_output_tokens,
        response_format=None if text is None or text.format is None else _response_format(text.format),
        tools=[_chat_tool(f"tools[{index}]", tool) for index, tool in enumerate(fields.tools or [])] or None,
        tool_choice=_tool_choice(fields.tool_choice),
        reasoning_effort=None if fields.reasoning is None else fields.reasoning.effort,
        logprobs=has_logprobs or None,
        top_logprobs=(fields.top_logprobs or 0) if has_logprobs else None,
        **{name: getattr(fields, name) for name in SAME_IN_CHATS},
    )


def _check(fields: ResponseRequest) -> None:
    """Refuse values that no chat would look at."""
    if fields.max_tool_calls is not None and fields.max_tool_calls < 1:
        raise invalid("max_tool_calls", f"is {fields.max_tool_calls}; it must be at least 1")
    if fields.top_logprobs is not None:
        between("top_logprobs", fields.top_logprobs, 0, 20)
        if fields.top_logprobs and LOGPROBS not in (fields.include or []):
            raise invalid("top_logprobs", f"is {fields.top_logprobs}; it needs {LOGPROBS!r} in include")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "is set; it needs stream to be true")
    if fields.background and fields.stream:
        raise invalid("background", "is true, and so is stream; a response in the background is read with GET")
    if fields.background and fields.store is False:
        raise invalid("background", "is true; it needs store, which is false")
    metadata = fields.metadata or {}
    at_most("the number of entries in metadata", len(metadata), MAX_METADATA, param="metadata")
    for key, value in metadata.items():
        at_most("the length of a key of metadata", len(key), MAX_METADATA_KEY, param="metadata")
        at_most("the length of a value of metadata", len(value), MAX_METADATA_VALUE, param="metadata")


def _chat_tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if not isinstance(kind, str) or kind not in _TOOL_KEYS:
        raise invalid(f"{where}.type", f"is {shown(kind)}; this server has no tools of its own, so it can be "
                      f"{' or '.join(_TOOL_KEYS)}")  # fmt: skip
    known = _TOOL_KEYS[kind]
    for name, value in tool.items():
        if name in _TOOL_REFUSALS:
            _TOOL_REFUSALS[name].check(f"{where}.{name}", value)
        elif name not in known and name != "type" and value is not None:
            raise invalid(f"{where}.{name[:MAX_NAME]}", f"is not known; a {kind} tool has {', '.join(known)}")
    return {"type": kind, kind: {name: tool[name] for name in known if tool.get(name) is not None}}


def _tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise invalid("tool_choice", f"is {shown(given)}; it can be none, auto, required or an object")
        return given
    if given is None:
        return None
    kind = given.get("type")
    if kind == "allowed_tools":
        tools = given.get("tools")
        if not isinstance(tools, list):
            raise invalid("tool_choice.tools", f"is {shown(tools)}; it must be a list of tools")
        named = [_named(f"tool_choice.tools[{index}]", tool) for index, tool in enumerate(tools)]
        return {"type": kind, "allowed_tools": {"mode": given.get("mode"), "tools": named}}
    return _named("tool_choice", given)


def _named(where: str, tool: Any) -> dict[str, Any]:
    """A tool by its name, which is next to the type here and one level deeper in chats."""
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(kind, str) or kind not in _TOOL_KEYS:
        raise invalid(f"{where}.type", f"is {shown(kind)}; it can be {', '.join(_TOOL_KEYS)} or allowed_tools")
    return {"type": kind, kind: {"name": tool.get("name")}}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid("text.format.type", f"is {shown(kind)}; it can be text, json_object or json_schema")
    if kind != "json_schema":
        for name in given:
            if name != "type":
                raise invalid(f"text.format.{name[:MAX_NAME]}", f"is not known; a {kind} format has no other field")
        return {"type": kind}
    return {"type": kind, "json_schema": {name: value for name, value in given.items() if name != "type"}}
