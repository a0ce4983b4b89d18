"""POST /v1/messages."""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.anthropic.chat_request import Translation
from quire.server.api.anthropic.encoder import MessageEncoder
from quire.server.api.anthropic.errors import own_headers
from quire.server.api.anthropic.requests import REFUSALS, MessagesRequest
from quire.server.api.chat import prepare_chat
from quire.server.api.dialect import Dialect
from quire.server.api.job import Job, answer
from quire.server.api.validation import typed
from quire.server.http.body import read_json
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.served_model import ServedModel
from quire.server.service.service import Service


async def messages(service: Service, request: Request) -> Response:
    body = await read_json(service, request)
    dialect, streams = request.scope["route"].dialect, body.raw.get("stream") is True
    response = await answer(service, request, body, _parse, dialect, name="messages", streams=streams)
    response.headers.update(own_headers())
    return response


def _parse(service: Service, dialect: Dialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
    settings, model = service.settings, service.model
    fields, unknown = typed(raw, MessagesRequest, REFUSALS, strict=settings.strict)
    translation = Translation(fields, model.max_total_tokens)
    if settings.strict:
        translation.unknown.refuse()
    unknown += translation.unknown.names
    prepared = prepare_chat(service, dialect, arrival, translation.chat, unknown, translation.own_name)
    encoder = MessageEncoder(fields, prepared.form, model.name_in_answers(fields.model))
    return Job(
        specs=[_within_limits(prepared.spec, fields.max_tokens, model)],
        body=encoder.body,
        events=encoder.events,
        num_characters=len(prepared.text),
        unknown=prepared.unknown,
        user=translation.chat.user,
        wants_timings=bool(fields.timings),
    )


def _within_limits(spec: GenerationSpec, max_tokens: int, model: ServedModel) -> GenerationSpec:
    """`spec` with as many tokens as are asked for and fit."""
    request = spec.request
    room = model.room_after(len(request.prompt), "messages")
    return replace(spec, request=replace(request, max_tokens=min(max_tokens, room)))
