"""POST /v1/chat/completions."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.chat import PreparedChat, prepare_chat
from quire.server.api.job import Job, answer
from quire.server.api.message_keys import unread_keys
from quire.server.api.openai.chat_encoder import ChatEncoder
from quire.server.api.openai.dialect import OpenAIDialect
from quire.server.api.openai.requests import CHAT_REFUSALS, ChatRequest
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.service.arrival import Arrival
from quire.server.service.service import Service


async def chat_completions(service: Service, request: Request) -> Response:
    return await answer_chat(service, request, await read_json(service, request), request.scope["route"].dialect)


async def answer_chat(service: Service, request: Request, body: Body, dialect: OpenAIDialect) -> Response:
    streams = body.raw.get("stream") is True
    return await answer(service, request, body, _parse, dialect, name="chat_completions", streams=streams)


def _parse(service: Service, dialect: OpenAIDialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
    fields, unknown, form, spec, text = parse_chat(service, dialect, arrival, raw)
    encoder = ChatEncoder(service.model, fields, form, dialect)
    return Job(
        specs=[spec],
        body=encoder.body,
        events=encoder.events,
        num_characters=len(text),
        num_top=fields.top_logprobs or 0,
        unknown=unknown,
        user=fields.user or fields.safety_identifier,
        wants_timings=bool(fields.timings),
    )


def parse_chat(service: Service, dialect: OpenAIDialect, arrival: Arrival, raw: dict[str, Any]) -> PreparedChat:
    fields, unknown = typed(raw, ChatRequest, CHAT_REFUSALS, strict=service.settings.strict)
    fields, unread = dialect.read(fields)
    unread += unread_keys(fields.messages, service.model.templates.words, strict=service.settings.strict)
    return prepare_chat(service, dialect, arrival, fields, [*unknown, *unread])
