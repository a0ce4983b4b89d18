"""Converts items to the messages of a chat."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.errors import invalid, shown
from quire.text.custom_input import INPUT
from quire.text.cut_object import complete_object


class Placed(NamedTuple):
    """An item, and its place in the request."""

    place: str
    item: dict[str, Any]


class ItemConversation:
    """The messages that a list of items stands for. `places` has the place of each message in the request, and
    `call_places` those of its calls.

    The items of one turn of the model, its thinking, its text and its calls, are one message of a chat.
    """

    def __init__(self, instructions: str | None, items: Sequence[Placed]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.call_places: list[list[str]] = []
        self._names: dict[str, str] = {}  # of the calls so far
        self._is_in_turn = False
        self._system: list[str] = []  # the texts of the first message, where that is the instructions
        if instructions is not None:
            self._begin("instructions", {"role": "system"})
            self._system.append(instructions)
        for place, item in items:
            _ADDERS[item["type"]](self, place, item)
        if self._system:
            self.messages[0]["content"] = "\n\n".join(self._system)
        for message in self.messages:  # thinking without an answer after it: messages have content or calls
            if message.get("content") is None and not message.get("tool_calls"):
                message["content"] = ""

    def _begin(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.places.append(place)
        self.call_places.append([])
        self._is_in_turn = message["role"] == "assistant"

    def _turn(self, place: str, *, without: Sequence[str]) -> dict[str, Any]:
        """The message of the turn in progress; a new one where that has one of the keys `without` already."""
        if not self._is_in_turn or any(self.messages[-1].get(key) is not None for key in without):
            self._begin(place, {"role": "assistant", "content": None})
        return self.messages[-1]

    def _add_message(self, place: str, item: dict[str, Any]) -> None:
        role = item["role"]
        texts = [part["text"] for part in item["content"]]
        if role == "assistant":
            self._turn(place, without=("content", "tool_calls"))["content"] = "".join(texts)
        elif role != "user" and len(self.messages) == 1 and self.places == ["instructions"]:
            # Many templates have room for one system message, at the beginning.
            self._system.append("".join(texts))
        else:
            parts = [{"type": "text", "text": text} for text in texts]
            self._begin(place, {"role": role, "content": texts[0] if len(texts) == 1 else parts})

    def _add_reasoning(self, place: str, item: dict[str, Any]) -> None:
        texts = [part["text"] for part in item["content"] or item["summary"]]
        if texts:
            turn = self._turn(place, without=("reasoning_content", "content", "tool_calls"))
            turn["reasoning_content"] = "\n".join(texts)

    def _add_call(self, place: str, item: dict[str, Any]) -> None:
        is_custom = item["type"] == "custom_tool_call"
        arguments = msgspec.json.encode({INPUT: item["input"]}).decode() if is_custom else item["arguments"]
        if item.get("status") == "incomplete":  # else no conversation with an answer that was cut could go on
            arguments = complete_object(arguments)
        self._names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": arguments}
        calls = self._turn(place, without=()).setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})
        self.call_places[-1].append(place)

    def _add_output(self, place: str, item: dict[str, Any]) -> None:
        call_id, output = item["call_id"], item["output"]
        name = self._names.get(call_id)
        if name is None:
            raise invalid(f"{place}.call_id", f"is {shown(call_id)}; no call before it has this id")
        text = output if isinstance(output, str) else "\n".join(part["text"] for part in output)
        self._begin(place, {"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def own_name(self, field: str) -> str:
        """The name that a field of chats has in this API."""
        match = _MESSAGE.match(field)
        if match is not None:
            number = match["number"]
            if number is None or int(number) >= len(self.places):
                return "input"
            if match["call"] is None:
                return self.places[int(number)]
            return self.call_places[int(number)][int(match["call"])] + (match["of_call"] or "")
        for chats, own in _NAMES:
            if chats.match(field):
                return chats.sub(own, field, count=1)
        return field


_ADDERS: dict[str, Callable[[ItemConversation, str, dict[str, Any]], None]] = {
    "message": ItemConversation._add_message,
    "reasoning": ItemConversation._add_reasoning,
    "function_call": ItemConversation._add_call,
    "custom_tool_call": ItemConversation._add_call,
    "function_call_output": ItemConversation._add_output,
    "custom_tool_call_output": ItemConversation._add_output,
}


_MESSAGE = re.compile(
    r"messages(?:\[(?P<number>\d+)\](?:\.tool_calls\[(?P<call>\d+)\](?:\.function(?P<of_call>\.\w+))?)?|$)"
)
_NAMES = (
    (re.compile(r"tools\[(\d+)\]\.(?:function|custom)(?!\w)"), r"tools[\1]"),
    (re.compile(r"response_format(?:\.json_schema)?(?!\w)"), "text.format"),
    (re.compile(r"max_(?:completion_)?tokens(?!\w)"), "max_output_tokens"),
    (re.compile(r"reasoning_effort(?!\w)"), "reasoning.effort"),
    (re.compile(r"verbosity(?!\w)"), "text.verbosity"),
)
