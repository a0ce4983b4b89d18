"""Renders conversations as prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.call_history import (
    NO_SUPPORT,
    ToolPlace,
    with_calls_as_rendered,
    with_tools_in_system_message,
    with_tools_in_system_prompt,
)
from quire.text.chat import ChatTemplate, with_parsed_arguments
from quire.text.shield import RenderedPrompt, Shield
from quire.text.tools import HERMES, with_system_in_user_message, with_system_text


def render_conversation(
    template: ChatTemplate,
    shield: Shield | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_prompt: str | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> RenderedPrompt:
    """Render a conversation.

    With a `shield`, special tokens in the arguments are plain text; without, they are those tokens.
    Tools that the template does not render are listed in the system message. `tool_prompt` follows there.
    """
    place = template.tool_place if tools is not None else ToolPlace.VARIABLE
    in_prompt = place is None
    given: Any = [messages, tools, documents, variables, tool_prompt]
    mark: str | None = None
    if shield is not None:
        if not in_prompt:  # parsed as the template parses them, so that escapes in arguments are seen
            given[0] = with_parsed_arguments(messages)
        if shield.touches(given):
            mark = shield.new_mark(given, template.source)
            given = shield.marked(given, mark)
    messages, tools, documents, variables, tool_prompt = given
    if tools is not None and in_prompt:
        form = template.call_format
        support = NO_SUPPORT if form is HERMES else template.call_support[False]
        messages, tools = with_tools_in_system_prompt(messages, tools, form, support), None
    else:
        has_tools = tools is not None and place is ToolPlace.VARIABLE
        messages = with_calls_as_rendered(messages, template.call_support[has_tools])
    if tools is not None and place is ToolPlace.SYSTEM_MESSAGE:
        messages, tools = with_tools_in_system_message(messages, tools), None
    if tool_prompt:
        messages = with_system_text(messages, tool_prompt)
    if (in_prompt or tool_prompt) and not template.takes_system:
        messages = with_system_in_user_message(messages)
    text = template.render(
        messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    return RenderedPrompt(text) if shield is None or mark is None else shield.resolved(text, mark)
