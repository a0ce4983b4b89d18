"""Rewrites tools, calls and results of a conversation to a form that the template renders, or to text."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from quire.errors import InvalidRequest
from quire.text.tools import HERMES, SEPARATOR, CallFormat, CallStyle, format_of, message_text, with_system_text

Message = Mapping[str, Any]

SYSTEM_PROMPT = """You can call functions. Here are their signatures as JSON, one a line:
<tools>
{tools}
</tools>
{how}"""
_IN_TAGS = """To call one, answer with a JSON object of its name and arguments within these tags:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>"""
_IN_SECTIONS = "To call one, answer with its name and a JSON object of its arguments exactly so:\n"


_NAME, _RESULT, _TEXT = "probed_function", "probed_result", "probed_text"
_IDS = "abcdefghi", "bcdefghij"  # nine characters, on which some templates insist
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "d"}}, "required": ["a"]}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probed_tool", "description": "d", "parameters": _PARAMETERS},
}
_AFTER_RESULT = "\n</tool_response>"
_THINKING = ("reasoning_content", "reasoning", "thinking")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True)
class CallSupport:
    """The messages about calls that a template renders whole."""

    without_text: tuple[str | None, ...]  # the contents, "" or None, that a message with calls only can have
    beside_text: bool
    after_text: bool  # a message of text, and then one of calls
    several: bool  # calls in one message
    results: bool
    user_after: bool  # a message of the user after a result
    id_length: int | None  # of calls, where the template insists on one

    @property
    def is_full(self) -> bool:
        return bool(self.without_text) and self.results


NO_SUPPORT = CallSupport(
    (), beside_text=False, after_text=False, several=True, results=False, user_after=True, id_length=None
)


def call_support(source: str, render: Callable[..., str], *, has_tools: bool) -> CallSupport:
    """Tested by rendering messages, with and without tools. `render` raises InvalidRequest if the template refuses."""

    def renders(*turns: Message, shows: Sequence[str]) -> bool:
        try:
            text = render([{"role": "user", "content": "probe"}, *turns], tools=[_TOOL] if has_tools else None)
        except InvalidRequest:
            return False
        return all(one in text for one in shows)

    first, second = _call(0), _call(1)
    without = tuple(content for content in ("", None) if renders(_turn(content, first), shows=[_NAME + "0"]))
    content = without[0] if without else ""
    result = {"role": "tool", "tool_call_id": _IDS[0], "name": f"{_NAME}0", "content": _RESULT}
    return CallSupport(
        without_text=without,
        beside_text=renders(_turn(_TEXT, first), shows=[_NAME + "0", _TEXT]),
        after_text=renders(_said(_TEXT), _turn(content, first), result, _said("done"), shows=[_NAME + "0", _TEXT]),
        several=renders(_turn(content, first, second), shows=[_NAME + "0", _NAME + "1"]),
        results=renders(_turn(content, first), result, shows=[_RESULT]),
        user_after=renders(_turn(content, first), result, {"role": "user", "content": _TEXT}, shows=[_RESULT, _TEXT]),
        id_length=9 if format_of(source).id_length == 9 else None,
    )


class ToolPlace(Enum):
    """The place from which a template reads tools."""

    VARIABLE = auto()
    SYSTEM_MESSAGE = auto()  # a key of it, as JSON


def tool_place(render: Callable[..., str]) -> ToolPlace | None:
    """Tested by rendering a tool; None if no place works. `render` is the template's."""
    tools, asked = [_TOOL], {"role": "user", "content": "probe"}
    system = {"role": "system", "content": "s"}
    places: dict[ToolPlace, Callable[[], str]] = {
        ToolPlace.VARIABLE: lambda: render([asked], tools=tools),
        ToolPlace.SYSTEM_MESSAGE: lambda: render([*with_tools_in_system_message([system], tools), asked]),
    }
    for place, rendered in places.items():
        with contextlib.suppress(InvalidRequest):
            if _TOOL["function"]["name"] in rendered():
                return place
    return None


def with_calls_as_rendered(messages: Sequence[Message], support: CallSupport) -> list[Message]:
    """The messages such that no call and no result is left out of the prompt."""
    plain = [_with_functions(message) for message in messages]
    if not any(message.get("tool_calls") or _is_result(message) for message in plain):
        return plain
    plain = list(_with_names(plain))
    if support.is_full and not support.several:
        plain = list(_one_by_one(plain))
    if support.id_length is not None:
        plain = [_with_short_ids(message, support.id_length) for message in plain]
    turns = _Turns()
    as_text = not support.is_full
    for message in plain:
        if message.get("tool_calls"):
            has_text = bool(message_text(message))
            as_text = not support.is_full or (has_text and not support.beside_text and not support.after_text)
            if has_text and not support.beside_text and not as_text:
                turns.add({key: value for key, value in message.items() if key != "tool_calls"})
                message = {key: value for key, value in message.items() if key not in _THINKING}
                has_text = False
            if not has_text and not as_text:
                message = {**message, "content": support.without_text[0]}
        if as_text and (message.get("tool_calls") or _is_result(message) or message.get("role") == "user"):
            turns.add_as_text(message)
            continue
        if not support.user_after and message.get("role") == "user" and turns.ends_with_result:
            turns.add(_said(""))  # the user continues before the assistant has answered
        turns.add(message)
    return turns.done()


class _Turns:
    """The messages of a conversation. Results as text and what the user says after them are one message, since many
    templates want roles to alternate."""

    def __init__(self) -> None:
        self._found: list[Message] = []
        self._results: Message | None = None  # the message being built
        self._texts: list[str] = []  # of it

    @property
    def ends_with_result(self) -> bool:
        return self._results is None and bool(self._found) and _is_result(self._found[-1])

    def add(self, message: Message) -> None:
        self._close()
        self._found.append(message)

    def add_as_text(self, message: Message) -> None:
        written = without_calls(message)
        if _is_result(message) and self._results is None:
            self._results = written
        if self._results is None or written.get("role") != "user":
            self.add(written)
            return
        self._texts.append(message_text(written))
        if not _is_result(message):
            self._close()

    def done(self) -> list[Message]:
        self._close()
        return self._found

    def _close(self) -> None:
        if self._results is not None:
            self._found.append({**self._results, "content": "\n".join(self._texts)})
            self._results, self._texts = None, []


def with_tools_in_system_message(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation about tools for a template that reads them from there."""
    has_system = bool(messages) and messages[0].get("role") == "system"
    system: Message = messages[0] if has_system else {"role": "system", "content": ""}
    functions = [tool.get("function", tool) for tool in tools]
    return [{**system, "tools": json.dumps(functions, ensure_ascii=False)}, *messages[has_system:]]


def with_tools_in_system_prompt(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    form: CallFormat = HERMES,
    support: CallSupport = NO_SUPPORT,
) -> list[dict[str, Any]]:
    """A conversation about tools for a template that does not render them. Calls are in `form`, Hermes' or sections."""
    how = _IN_TAGS
    if form.style is CallStyle.SECTIONS:
        after_name = "\n```json\n" if form.fenced else SEPARATOR
        how = f'{_IN_SECTIONS}{form.begin}the name{after_name}{{"an argument": "its value"}}{form.end}'
    prompt = SYSTEM_PROMPT.format(tools="\n".join(json.dumps(tool) for tool in tools), how=how)
    return with_system_text(with_calls_as_rendered(messages, support), prompt)


def without_calls(message: Message) -> Message:
    """Calls and their results as text, as Hermes models write them."""
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if _is_result(message):
        plain.pop("name", None)  # which would be the user's
        return plain | {"role": "user", "content": f"<tool_response>\n{message_text(message)}{_AFTER_RESULT}"}
    if not message.get("tool_calls"):
        return plain
    written = [message_text(message)]
    for call in message["tool_calls"]:
        function = call.get("function", {})
        arguments = function.get("arguments") or "{}"
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append(f"{HERMES.begin}{HERMES.opening(str(function.get('name')))}{arguments}}}{HERMES.end}")
    return plain | {"content": "\n".join(part for part in written if part)}


def _with_functions(message: Message) -> Message:
    """Every call is one of a function: that of a custom tool has an input. No calls are none, which templates may look
    for."""
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if all("function" in call for call in calls):
        return message
    return {**message, "tool_calls": [_with_function(call) for call in calls]}


def _with_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "function" in call:
        return call
    custom = call.get("custom")
    if isinstance(custom, Mapping):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input") or ""}}
    else:
        function = {"name": call.get("name"), "arguments": call.get("arguments")}
    around = {key: value for key, value in call.items() if key not in ("custom", "name", "arguments")}
    return {**around, "type": "function", "function": function}


def _with_names(messages: Sequence[Message]) -> Iterator[Message]:
    """Results with the names of their functions, which some templates write and most clients leave to the calls."""
    names: dict[str, Any] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[str(call.get("id"))] = call["function"].get("name")
        name = names.get(str(message.get("tool_call_id"))) if _is_result(message) else None
        yield {**message, "name": name} if name is not None and not message.get("name") else message


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Put each call into its own message, before its result."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: dict[str, list[Message]] = {}
        while at < len(messages) and _is_result(messages[at]):
            results.setdefault(str(messages[at].get("tool_call_id")), []).append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            yield {**message, "content": message.get("content") if not number else None, "tool_calls": [call]}
            yield from results.pop(str(call.get("id")), ())
        for left in results.values():
            yield from left


def _with_short_ids(message: Message, length: int) -> Message:
    if message.get("tool_calls"):
        calls = [{**call, "id": _short_id(call.get("id"), length)} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if _is_result(message):
        return {**message, "tool_call_id": _short_id(message.get("tool_call_id"), length)}
    return message


def _short_id(given: Any, length: int) -> str:
    """A short id that is the same for equal ids, so that calls and results match."""
    if isinstance(given, str) and len(given) == length and given.isalnum() and given.isascii():
        return given
    digest = hashlib.sha256(str(given).encode("utf-8", "replace")).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:length])


def _is_result(message: Message) -> bool:
    return message.get("role") in ("tool", "function")


def _call(number: int) -> dict[str, Any]:
    function = {"name": f"{_NAME}{number}", "arguments": {"a": 1}}
    return {"id": _IDS[number], "type": "function", "function": function}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _turn(content: str | None, *calls: Mapping[str, Any]) -> Message:
    return {"role": "assistant", "content": content, "tool_calls": [*calls]}
