"""Conversations as prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.chat import ChatTemplate, with_parsed_arguments
from quire.text.shield import Prompt, Shield
from quire.text.tools import told_in_text, with_system_text


def render_conversation(
    template: ChatTemplate,
    shield: Shield | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    are_tools_told: bool = False,
    tool_prompt: str | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Prompt:
    """The conversation as its template has it.

    With a `shield`, special tokens in what is given here are plain text; without, they are those tokens.
    `are_tools_told`: in the system message, for a template that knows nothing of tools; `tool_prompt` follows there.
    """
    given: Any = [messages, tools, documents, variables, tool_prompt]
    mark: str | None = None
    if shield is not None:
        if not are_tools_told:  # as the template would, so that what arguments say in escapes is looked at as well
            given[0] = with_parsed_arguments(messages)
        if shield.touches(given):
            mark = shield.new_mark(given, template.source)
            given = shield.marked(given, mark)
    messages, tools, documents, variables, tool_prompt = given
    if tools is not None and are_tools_told:
        messages, tools = told_in_text(messages, tools), None
    if tool_prompt:
        messages = with_system_text(messages, tool_prompt)
    text = template.render(
        messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    return Prompt(text) if shield is None or mark is None else shield.resolved(text, mark)
