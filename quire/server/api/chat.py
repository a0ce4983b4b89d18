"""Turns chat requests of every API into jobs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.errors import invalid
from quire.grammar.answers import AnswerRules
from quire.grammar.lark import mark_tokens
from quire.request import MAX_LOGPROBS, GrammarKind
from quire.server.api.dialect import Dialect
from quire.server.api.field_names import OwnName, named_by
from quire.server.api.grammars import with_grammar
from quire.server.api.openai.constraints import constraint_of
from quire.server.api.openai.requests import ChatRequest
from quire.server.api.openai.spec_builder import SpecBuilder
from quire.server.api.openai.tools import tool_use
from quire.server.api.prompts import encode_conversation
from quire.server.api.reasoning import answer_form, template_variables, thinking_budget
from quire.server.api.sampling import between
from quire.server.api.tool_use import ToolUse
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec, NamedGrammar
from quire.server.service.service import Service
from quire.text.answer_parts import AnswerForm
from quire.text.shield import RenderedPrompt


class PreparedChat(NamedTuple):
    fields: ChatRequest
    unknown: list[str]  # fields that the API does not know
    form: AnswerForm  # of its answers
    spec: GenerationSpec
    text: str  # the rendered conversation


def prepare_chat(
    service: Service,
    dialect: Dialect,
    arrival: Arrival,
    fields: ChatRequest,
    unknown: Sequence[str] = (),
    own_name: OwnName = str,
) -> PreparedChat:
    """Everything about a chat except the encoding of its answers. Errors name fields as `own_name` translates them.
    May run in a thread."""
    with named_by(own_name):
        form, spec, text = _prepared(service, dialect, arrival, fields)
    if spec.unchecked_grammar is not None:
        spec = replace(spec, unchecked_grammar=spec.unchecked_grammar.renamed(own_name))
    return PreparedChat(fields, list(unknown), form, spec, text)


def _prepared(
    service: Service, dialect: Dialect, arrival: Arrival, fields: ChatRequest
) -> tuple[AnswerForm, GenerationSpec, str]:
    constraint = constraint_of(fields, service.model)
    tools = tool_use(fields, service.model, constraint)
    builder = _spec_builder(service, dialect, arrival, fields)
    with arrival.tokenising():
        prompt, tokens = encode_chat(service, fields, tools)
    spec = builder.spec(tokens)
    has_grammars = not service.settings.disable_grammar_support
    form = answer_form(fields, service.model, tools, prompt.text, has_grammars=has_grammars)
    spec = _with_rules(service, spec, fields, form, prompt.text, constraint, tools)
    if _has_special_marks(service, form):
        spec = replace(spec, skip_special_tokens=False)
    return form, spec, prompt.text


def encode_chat(service: Service, fields: ChatRequest, tools: ToolUse | None) -> tuple[RenderedPrompt, list[int]]:
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
        variables=template_variables(fields, service.model),
    )


def _spec_builder(service: Service, dialect: Dialect, arrival: Arrival, fields: ChatRequest) -> SpecBuilder:
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
        arrival,
        max_tokens=max_tokens,
        limit_field=limit_field,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        samples=1 if fields.n is None else fields.n,
    )


def _with_rules(
    service: Service,
    spec: GenerationSpec,
    fields: ChatRequest,
    form: AnswerForm,
    prompt: str,
    constraint: NamedGrammar | None,
    tools: ToolUse | None,
) -> GenerationSpec:
    """`spec` with the grammar of its answers, if any constraint is set. The grammar begins after the thinking."""
    model, settings = service.model, service.settings
    budget = thinking_budget(fields, model, form, prompt)
    if constraint is not None and constraint.grammar.kind is GrammarKind.TOKENS:
        if budget is not None:
            raise invalid(
                constraint.field, "and a limit of the thinking are both set; an answer can keep to one of them"
            )
        return with_grammar(settings, spec, constraint)
    if constraint is None and budget is None and (tools is None or not form.guided):
        return spec
    thinking = form.thinking
    if thinking is not None and thinking.is_closed_at_end_of(prompt):
        thinking = None
    calls, plain = None if tools is None else tools.calls, None if constraint is None else constraint.grammar
    rules = AnswerRules(calls, plain, thinking, form.begins_in_thinking)
    grammar = replace(rules.grammar(mark_tokens(model.tokenizer, form.marks)), thinking_budget=budget)
    field = "tools" if tools is not None else "thinking_budget" if constraint is None else constraint.field
    return with_grammar(settings, spec, NamedGrammar(field, grammar, constraint), rules.grammar({}))


def _has_special_marks(service: Service, form: AnswerForm) -> bool:
    """True if marks around parts of an answer are special tokens."""
    return any(service.model.tokenizer.special_id(mark) is not None for mark in form.marks)
