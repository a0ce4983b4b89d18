"""Switches thinking on or off, and limits its length."""

from typing import Any

from quire.errors import invalid, shown
from quire.request import ThinkingBudget
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.sampling import between
from quire.server.api.tool_use import ToolUse
from quire.server.service.served_model import ServedModel
from quire.text.answer_parts import AnswerForm
from quire.text.thinking import thinking_of
from quire.text.tools import message_text

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")  # variables by which templates turn thinking on and off
_EFFORT = "reasoning_effort"


def template_variables(fields: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """The variables of the template: those of the request, and others by its `reasoning_effort`."""
    effort, given = fields.reasoning_effort, fields.chat_template_kwargs or {}
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise invalid(_EFFORT, f"is {shown(effort)}; it can be {', '.join(EFFORTS)}")
    words = model.templates.words
    switches = {name: effort != "none" for name in _SWITCHES if name in words}
    return switches | ({_EFFORT: effort} if _EFFORT in words else {}) | given


def answer_form(
    fields: ChatRequest, model: ServedModel, tools: ToolUse | None, prompt: str, *, has_grammars: bool = True
) -> AnswerForm:
    """The form of answers to a rendered conversation. Without grammars, optional calls are found in what
    the model writes of itself."""
    thinking = thinking_of(model.templates.select(with_tools=tools is not None).source)
    is_opened = thinking is not None and thinking.is_open_at_end_of(prompt)
    if thinking is not None and fields.continue_final_message:
        is_opened = thinking.is_open_in(message_text(fields.messages[-1]))
        thinking = thinking if is_opened else None
    return AnswerForm(
        thinking=thinking,
        calls=None if tools is None else tools.calls.form,
        begins_in_thinking=is_opened,
        tools=None if tools is None else {tool.name: tool.parameters for tool in tools.calls.tools},
        guided=has_grammars or tools is None or tools.calls.needs_grammar,
        custom=frozenset() if tools is None else frozenset(tool.name for tool in tools.calls.tools if tool.is_custom),
    )


def thinking_budget(fields: ChatRequest, model: ServedModel, form: AnswerForm, prompt: str) -> ThinkingBudget | None:
    """The limit on thinking tokens; None if there is no limit, or no thinking."""
    limit = fields.thinking_budget
    if limit is not None:
        between("thinking_budget", limit, 0, model.max_total_tokens)
    elif fields.reasoning_effort == "none" and not model.templates.words.intersection((*_SWITCHES, _EFFORT)):
        limit = 0  # the template cannot turn it off
    thinking = form.thinking
    if limit is None or thinking is None or thinking.is_closed_at_end_of(prompt):
        return None
    return ThinkingBudget(thinking.begin, thinking.end, form.begins_in_thinking, limit)
