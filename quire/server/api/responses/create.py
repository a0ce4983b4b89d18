"""POST /v1/responses."""

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.dialect import Dialect
from quire.server.api.job import Job, answer, ignored_header
from quire.server.api.responses.background import answer_in_background
from quire.server.api.responses.history import load_history
from quire.server.api.responses.parse import parse_response
from quire.server.api.responses.resources import InputTokens
from quire.server.http.body import Body, read_json
from quire.server.service.arrival import Arrival
from quire.server.service.service import Service


async def count_input_tokens(service: Service, request: Request) -> Response:
    """The tokens that the same body would have as its prompt."""
    body = await read_json(service, request)
    history = await load_history(service, body)
    arrival = Arrival(request.headers, "input_tokens")
    dialect = request.scope["route"].dialect
    work = partial(parse_response, service, dialect, arrival, body.raw, history=history)
    job, _ = await service.offload.run(body.num_bytes + history.num_bytes, work)
    counted: InputTokens = {
        "object": "response.input_tokens",
        "input_tokens": sum(len(spec.request.prompt) for spec in job.specs),
    }
    return Response(msgspec.json.encode(counted), 200, ignored_header(job.unknown), "application/json")


async def create_response(service: Service, request: Request) -> Response:
    body = await read_json(service, request)
    history = await load_history(service, body)
    body = Body(body.raw, body.num_bytes + history.num_bytes)
    dialect = request.scope["route"].dialect
    parse = partial(parse_response, history=history)
    if body.raw.get("background") is True:
        return await answer_in_background(service, request, body, parse, dialect)

    def parse_job(service: Service, dialect: Dialect, arrival: Arrival, raw: dict[str, Any]) -> Job:
        return parse(service, dialect, arrival, raw).job

    streams = body.raw.get("stream") is True
    return await answer(service, request, body, parse_job, dialect, name="responses", streams=streams)
