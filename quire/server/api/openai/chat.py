"""POST /v1/chat/completions."""

from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import invalid
from quire.server.api.grammars import grammar_of, with_grammar
from quire.server.api.job import Job, answer
from quire.server.api.openai.chat_encoder import ChatEncoder
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.requests import CHAT_REFUSALS, ChatRequest
from quire.server.api.openai.spec_builder import SpecBuilder
from quire.server.api.openai.tools import tool_use
from quire.server.api.prompts import encode_conversation
from quire.server.api.tool_use import ToolUse
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.service import Service
from quire.text.shield import Prompt


async def chat_completions(service: Service, request: Request) -> Response:
    return await answer_chat(service, request, await read_json(service, request), request.scope["route"].dialect)


async def answer_chat(service: Service, request: Request, body: Body, dialect: OpenAIDialect) -> Response:
    streams = body.raw.get("stream") is True
    return await answer(service, request, body, _parse, dialect, name="chat_completions", streams=streams)


def _parse(service: Service, dialect: OpenAIDialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
    fields, unknown, tools, spec, text = parse_chat(service, dialect, arrival, raw)
    encoder = ChatEncoder(service.model, fields, tools, dialect)
    return Job(
        specs=[spec],
        body=encoder.body,
        events=encoder.events,
        num_characters=len(text),
        num_top=fields.top_logprobs or 0,
        unknown=unknown,
        user=fields.user,
        wants_timings=bool(fields.timings),
    )


class ParsedChat(NamedTuple):
    fields: ChatRequest
    unknown: list[str]  # fields that the API does not know
    tools: ToolUse | None
    spec: GenerationSpec
    text: str  # the rendered conversation


def parse_chat(service: Service, dialect: OpenAIDialect, arrival: Arrival, raw: dict[str, Any]) -> ParsedChat:
    settings, model = service.settings, service.model
    fields, unknown = typed(raw, ChatRequest, CHAT_REFUSALS, strict=settings.strict)
    fields, unread = dialect.read(fields)
    tools = tool_use(fields, model)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs", f"is {fields.top_logprobs}; it needs logprobs to be true")
    limit_field = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(fields, limit_field)
    if max_tokens is not None and max_tokens < 1:
        raise invalid(limit_field, f"is {max_tokens}; it must be at least 1")
    builder = SpecBuilder(
        fields,
        model,
        settings,
        dialect,
        max_tokens=max_tokens,
        limit_field=limit_field,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        samples=1 if fields.n is None else fields.n,
    )
    with arrival.tokenising():
        prompt, tokens = encode_chat(service, fields, tools)
    spec = builder.spec(tokens)
    grammar = grammar_of("response_format", fields.response_format)
    if tools is None:
        spec = with_grammar(settings, spec, "response_format", grammar)
    elif grammar is not None:
        raise invalid("response_format", "and tools are both set; an answer can follow one of them")
    else:
        spec = with_grammar(settings, spec, "tools", tools.grammar, tools.checked)
        if tools.shows_special:
            spec = replace(spec, skip_special_tokens=False)
    return ParsedChat(fields, [*unknown, *unread], tools, spec, prompt.text)


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
