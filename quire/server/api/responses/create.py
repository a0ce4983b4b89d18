"""POST /v1/responses."""

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.dialect import Dialect
from quire.server.api.job import Job, answer
from quire.server.api.responses.background import answer_in_background
from quire.server.api.responses.history import load_history
from quire.server.api.responses.parse import parse_response
from quire.server.http.body import Body, read_json
from quire.server.service.arrival import Arrival
from quire.server.service.service import Service


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
