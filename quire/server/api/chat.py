"""Chats as jobs, of every API that has them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.errors import invalid
from quire.request import MAX_LOGPROBS
from quire.server.api.dialect import Dialect
from quire.server.api.grammars import with_grammar
from quire.server.api.openai.constraints import constraint_of
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.openai.spec_builder import SpecBuilder
from quire.server.api.openai.tools import tool_use
from quire.server.api.prompts import encode_conversation
from quire.server.api.sampling import between
from quire.server.api.tool_use import ToolUse
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec, NamedGrammar
from quire.server.service.service import Service
from quire.text.answer_parts import AnswerForm
from quire.text.shield import Prompt
from quire.text.thinking import thinking_of


class PreparedChat(NamedTuple):
    fields: ChatRequest
    unknown: list[str]  # fields that the API does not know
    form: AnswerForm  # of its answers
    spec: GenerationSpec
    text: str  # the rendered conversation


def prepare_chat(
    service: Service, dialect: Dialect, arrival: Arrival, fields: ChatRequest, unknown: Sequence[str] = ()
) -> PreparedChat:
    """Everything about a chat but how its answers are written. May run in a thread."""
    settings, model = service.settings, service.model
    constraint = constraint_of(fields, model.tokenizer)
    tools = tool_use(fields, model, constraint)
    builder = _spec_builder(service, dialect, fields)
    with arrival.tokenising():
        prompt, tokens = encode_chat(service, fields, tools)
    spec = builder.spec(tokens)
    form = _answer_form(service, tools, prompt.text)
    if tools is None:
        spec = with_grammar(settings, spec, constraint)
    else:
        spec = with_grammar(settings, spec, NamedGrammar("tools", tools.grammar), tools.checked)
    if not spec.skip_special_tokens or _has_special_marks(service, form):
        spec = replace(spec, skip_special_tokens=False)
    return PreparedChat(fields, list(unknown), form, spec, prompt.text)


def encode_chat(service: Service, fields: ChatRequest, tools: ToolUse | None) -> tuple[Prompt, list[int]]:
    """The rendered conversation, and its tokens."""
    continues = bool(fields.continue_final_message)
    return encode_conversation(
        service,
        fields.messages,
        tools=tools,
        tool_prompt=None if tools is None else fields.tool_prompt,
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        documents=fields.documents,
        variables=fields.chat_template_kwargs,
    )


def _spec_builder(service: Service, dialect: Dialect, fields: ChatRequest) -> SpecBuilder:
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", f"is {fields.top_logprobs}; it needs logprobs to be true")
    between("top_logprobs", fields.top_logprobs or 0, 0, MAX_LOGPROBS)
    limit_field = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(fields, limit_field)
    if max_tokens is not None and max_tokens < 1:
        raise invalid(limit_field, f"is {max_tokens}; it must be at least 1")
    return SpecBuilder(
        fields,
        service.model,
        service.settings,
        dialect,
        max_tokens=max_tokens,
        limit_field=limit_field,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        samples=1 if fields.n is None else fields.n,
    )


def _answer_form(service: Service, tools: ToolUse | None, prompt: str) -> AnswerForm:
    """The form of answers to a rendered conversation."""
    with_tools = tools is not None and not tools.in_system_prompt
    thinking = thinking_of(service.model.templates.select(with_tools=with_tools).source)
    return AnswerForm(
        thinking=thinking,
        calls=None if tools is None else tools.form,
        begins_in_thinking=thinking is not None and thinking.is_open_at_end_of(prompt),
    )


def _has_special_marks(service: Service, form: AnswerForm) -> bool:
    """True if marks around parts of an answer are special tokens."""
    marks = [*(form.thinking.marks if form.thinking else ()), *(form.calls.marks if form.calls else ())]
    return any(service.model.tokenizer.special_id(mark) is not None for mark in marks)
