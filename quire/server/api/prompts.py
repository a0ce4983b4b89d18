"""Renders and tokenises prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import invalid, shown
from quire.server.api.message_keys import with_refusals_as_text
from quire.server.api.tool_use import ToolUse
from quire.server.service.service import Service
from quire.text.conversation import render_conversation
from quire.text.message_fields import check_fields
from quire.text.shield import RenderedPrompt

_IN_PLACE_OF_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "refusal")
_TEXT_PARTS = ("text", "refusal")  # by the key that has the text
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def encode_conversation(
    service: Service,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: ToolUse | None = None,
    tool_prompt: str | None = None,
    **options: Any,
) -> tuple[RenderedPrompt, list[int]]:
    """The rendered conversation, and its tokens. `options` are those of `render_conversation`."""
    messages = [with_refusals_as_text(message) for message in messages]
    check_messages(messages)
    model = service.model
    prompt = render_conversation(
        model.templates.select(with_tools=tools is not None),
        None if service.settings.parses_special_in_messages else model.tokenizer.shield,
        [_with_known_role(message) for message in messages],
        tools=None if tools is None else tools.rendered,
        tool_prompt=tool_prompt,
        **options,
    )
    return prompt, model.tokenizer.encode_prompt(prompt)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse messages that no template can render."""
    for index, message in enumerate(messages):
        _check_message(index, message)


def _check_message(index: int, message: Mapping[str, Any]) -> None:
    check_fields(f"messages[{index}]", message)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise invalid(f"messages[{index}].role", f"is {shown(role)}; it must be one of {', '.join(ROLES)}")
    if content is None:
        has_more = role == "assistant" and any(message.get(key) for key in _IN_PLACE_OF_CONTENT)
        if not has_more:
            raise invalid(f"messages[{index}].content", "is missing; only messages with tool_calls have none")
    elif isinstance(content, list):
        for number, part in enumerate(content):
            _check_part(index, number, part)
    elif not isinstance(content, str):
        raise invalid(f"messages[{index}].content", f"is {shown(content)}; it must be a string or a list of parts")


def _check_part(index: int, number: int, part: Any) -> None:
    where = f"messages[{index}].content[{number}]"
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in _TEXT_PARTS:
        raise invalid(f"{where}.type", f"is {shown(kind)}; only 'text' is supported")
    if not isinstance(part.get(kind), str):
        raise invalid(f"{where}.{kind}", f"is {shown(part.get(kind))}; it must be a string")


def _with_known_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace the role developer by system, its older name, which templates know."""
    return {**message, "role": "system"} if message["role"] == "developer" else message
