"""Messages of the Anthropic API as a conversation that chat templates know."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import invalid, shown
from quire.server.api.anthropic.unknown_fields import UnknownFields

ROLES = ("user", "assistant", "system")
BETWEEN_TURNS = "\n\n"  # texts of messages that become one turn, and the blocks of a system prompt
ERROR = "Error: "  # before the result of a tool that failed
_ALWAYS = {"type", "cache_control"}  # every prompt is cached, with and without the latter
_MESSAGE_FIELDS = {"role", "content"}
_BLOCK_FIELDS = {
    "text": _ALWAYS | {"text", "citations"},
    "thinking": _ALWAYS | {"thinking", "signature"},
    "redacted_thinking": _ALWAYS | {"data"},  # nothing here can read it
    "tool_use": _ALWAYS | {"id", "name", "input", "caller"},
    "tool_result": _ALWAYS | {"tool_use_id", "content", "is_error"},
}
_BY_ROLE = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_REASONS = {
    "image": "images are not supported",
    "document": "documents are not supported; send their text",
    "search_result": "search results are not supported; send their text",
    "server_tool_use": "there are no server tools",
    "mcp_tool_use": "there are no server tools",
}


@dataclass
class Turn:
    """One message for the chat template."""

    role: str
    place: str  # the field of the request that it comes from
    texts: list[str] = field(default_factory=list)  # texts of the messages that were merged into this one
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # of a tool result: the id of its call

    def message(self) -> dict[str, Any]:
        text = BETWEEN_TURNS.join(filter(None, self.texts))
        message: dict[str, Any] = {"role": self.role, **self.answers, "content": text}
        if self.thoughts:
            message["reasoning_content"] = BETWEEN_TURNS.join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class TurnBuilder:
    """Collects turns. Consecutive messages of one role are merged: some templates require roles to alternate."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.unknown = UnknownFields()
        self._tools: dict[str, str] = {}  # names of tools by the ids of their calls

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [turn.message() for turn in self.turns]

    def add_system(self, system: str | Sequence[Any] | None) -> None:
        if system:
            self._turn("system", "system").texts += self._texts("system", system)

    def add_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            role, content = message.get("role"), message.get("content")
            if role not in ROLES:
                raise invalid(f"{where}.role", f"is {shown(role)}; it must be one of {', '.join(ROLES)}")
            self.unknown.note(where, message, _MESSAGE_FIELDS)
            if not isinstance(content, (str, list)):
                raise invalid(f"{where}.content", f"is {shown(content)}; it must be a string or a list of blocks")
            if role == "system":
                self._turn(role, where).texts += self._texts(f"{where}.content", content)
            elif isinstance(content, str):
                self._turn(role, where).texts.append(content)
            elif role == "user":
                self._add_user(where, content)
            else:
                self._add_assistant(where, content)

    def _turn(self, role: str, where: str) -> Turn:
        """The last turn where it has the same role, and no calls, which results follow; else a new one."""
        last = self.turns[-1] if self.turns else None
        if last is None or last.role != role or last.calls:
            last = Turn(role, where)
            self.turns.append(last)
        return last

    def _texts(self, where: str, content: str | Sequence[Any]) -> list[str]:
        """The texts of `content`, which may hold text blocks only."""
        if isinstance(content, str):
            return [content]
        places = [f"{where}[{index}]" for index in range(len(content))]
        blocks = [self._block(at, "system", given) for at, given in zip(places, content, strict=True)]
        return [_text(f"{at}.text", block.get("text")) for at, block in zip(places, blocks, strict=True)]

    def _add_user(self, where: str, content: list[Any]) -> None:
        texts: list[str] = []
        for index, given in enumerate(content):
            at = f"{where}.content[{index}]"
            block = self._block(at, "user", given)
            if block["type"] == "text":
                texts.append(_text(f"{at}.text", block.get("text")))
                continue
            if texts:
                self._turn("user", where).texts.append("".join(texts))
                texts = []
            self._add_result(at, block)
        if texts or not content:
            self._turn("user", where).texts.append("".join(texts))

    def _add_result(self, where: str, block: Mapping[str, Any]) -> None:
        call, content, is_error = (block.get(name) for name in ("tool_use_id", "content", "is_error"))
        name = self._tools.get(call) if isinstance(call, str) else None
        if not isinstance(call, str) or name is None:
            raise invalid(f"{where}.tool_use_id", f"is {shown(call)}; no tool_use block before it has this id")
        if content is not None and not isinstance(content, (str, list)):
            raise invalid(f"{where}.content", f"is {shown(content)}; it must be a string or a list of blocks")
        if is_error is not None and not isinstance(is_error, bool):
            raise invalid(f"{where}.is_error", f"is {shown(is_error)}; it must be true or false")
        text = "".join([ERROR if is_error else "", *self._texts(f"{where}.content", content or "")])
        self.turns.append(Turn("tool", where, [text], answers={"tool_call_id": call, "name": name}))

    def _add_assistant(self, where: str, content: list[Any]) -> None:
        turn = self._turn("assistant", where)
        texts: list[str] = []
        for index, given in enumerate(content):
            at = f"{where}.content[{index}]"
            block = self._block(at, "assistant", given)
            if block["type"] == "text":
                texts.append(_text(f"{at}.text", block.get("text")))
            elif block["type"] == "thinking":
                thought = _text(f"{at}.thinking", block.get("thinking"))
                turn.thoughts += [thought] if thought else []
            elif block["type"] == "tool_use":
                turn.calls.append(self._call(at, block))
        turn.texts.append("".join(texts))

    def _call(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        call = _name(f"{where}.id", block.get("id"))
        name = _name(f"{where}.name", block.get("name"))
        given = block.get("input")
        if not isinstance(given, dict):
            raise invalid(f"{where}.input", f"is {shown(given)}; it must be an object")
        self._tools[call] = name
        arguments = json.dumps(given, ensure_ascii=False)
        return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _block(self, where: str, role: str, given: Any) -> Mapping[str, Any]:
        """A block of a kind that messages of `role` may have."""
        if not isinstance(given, dict):
            raise invalid(where, f"is {shown(given)}; it must be a block, an object with a type")
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _BY_ROLE[role]:
            reason = _REASONS.get(kind) if isinstance(kind, str) else None
            can_be = f"it can be {', '.join(_BY_ROLE[role])}"
            raise invalid(f"{where}.type", f"is {shown(kind)}; {f'{reason}; ' if reason else ''}{can_be}")
        self.unknown.note(where, given, _BLOCK_FIELDS[kind])
        return given


def _text(where: str, given: Any) -> str:
    if not isinstance(given, str):
        raise invalid(where, f"is {shown(given)}; it must be a string")
    return given


def _name(where: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise invalid(where, f"is {shown(given)}; it must be a string that is not empty")
    return given
