"""Tools that a model may call, and how it writes its calls.

Templates are made for models that were trained on one way of writing, so the template tells which. For a template
that does not render tools the system message lists them, and the model writes as Hermes models do.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import invalid

SYSTEM_PROMPT = """You can call functions. Here are their signatures as JSON, one a line:
<tools>
{tools}
</tools>
To call one, answer with a JSON object of its name and arguments within these tags:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]  # a JSON schema


@dataclass(frozen=True)
class CallFormat:
    """Calls in an answer: `begin`, one or several calls, `end`. A call is {"name": ..., `arguments`: ...}."""

    marks: tuple[str, ...]  # the parts of it that may be special tokens
    begin: str
    end: str
    between: str | None  # two calls; None where there is only one
    arguments: str = "arguments"
    id_length: int = 24  # characters of the name that a call gets

    def opening(self, name: str) -> str:
        """The text before the arguments of a call."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '


HERMES = CallFormat(("<tool_call>", "</tool_call>"), "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n")
MISTRAL = CallFormat(("[TOOL_CALLS]",), "[TOOL_CALLS][", "]", ", ", id_length=9)  # its templates insist on nine
LLAMA3 = CallFormat((), "", "", None, arguments="parameters")


def takes_tools(template: str) -> bool:
    """True if a template renders the tools it is given."""
    return "tools" in template


def format_of(template: str) -> CallFormat:
    """The form in which the model of this template writes calls."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and "ipython" in template and takes_tools(template):
        return LLAMA3
    return HERMES


def check_calls(where: str, message: Mapping[str, Any]) -> None:
    """Refuse calls in a message, at `where`, that are not a list of objects."""
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, (list, tuple)):
        raise invalid(f"{where}.tool_calls", f"is a {type(calls).__name__}; it must be a list of calls")
    for number, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function", {}), Mapping):
            raise invalid(f"{where}.tool_calls[{number}]", "is no call; it must be an object with a function")


def with_tools_in_system_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A conversation about tools for a template that does not render them."""
    prompt = SYSTEM_PROMPT.format(tools="\n".join(json.dumps(tool) for tool in tools))
    return with_system_text([_without_calls(message) for message in messages], prompt)


def with_system_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with `text` at the end of its system message, which it gets if it has none."""
    rest = [dict(message) for message in messages]
    if rest and rest[0].get("role") in ("system", "developer"):
        text = f"{_text_of(rest.pop(0))}\n\n{text}".strip()
    return [{"role": "system", "content": text}, *rest]


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Calls and their results as text, in the words of the system prompt."""
    plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message.get("role") == "tool":
        return plain | {"role": "user", "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return plain
    written = [_text_of(message)]
    for call in message["tool_calls"]:
        function = call.get("function", {})
        arguments = function.get("arguments", "{}")
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        written.append(f"{HERMES.begin}{HERMES.opening(str(function.get('name')))}{arguments}}}{HERMES.end}")
    return plain | {"content": "\n".join(part for part in written if part)}


def _text_of(message: Mapping[str, Any]) -> str:
    """Its content, which is a text, parts of one, or nothing."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
