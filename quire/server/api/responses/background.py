"""Responses in the background: they are stored, and read later."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from quire.errors import QuireError, invalid
from quire.server.api.dialect import Dialect
from quire.server.api.job import ignored_header
from quire.server.api.responses.encoder import ResponseEncoder
from quire.server.api.responses.parse import ParsedResponse
from quire.server.http.body import Body
from quire.server.service.answers import ClientGone, collect
from quire.server.service.arrival import Arrival
from quire.server.service.response_database import KeptResponse
from quire.server.service.service import Service
from quire.server.service.stream import Stream
from quire.server.tenant import api_key


async def answer_in_background(
    service: Service,
    request: Request,
    body: Body,
    parse: Callable[[Service, Dialect, Arrival, dict[str, Any]], ParsedResponse],
    dialect: Dialect,
) -> Response:
    """Begin a response and answer at once."""
    store = service.response_store
    if not store.is_on:
        raise invalid("background", "is true; this server keeps no responses (--max-stored-responses 0)")
    arrival = Arrival(request.headers, "responses")
    job, encoder = await service.offload.run(body.num_bytes, lambda: parse(service, dialect, arrival, body.raw))
    arrival.wants_timings |= job.wants_timings
    await service.grammar_check.check(job.specs, arrival.times)
    stream = service.open(job.specs, arrival, user=job.user)
    try:
        begun = encoder.begun("in_progress")._replace(is_running=True)
        refusal = await store.add(api_key.get(), begun)
        if refusal is not None:
            raise refusal
    except BaseException:
        stream.close()
        raise
    store.run_in_background(api_key.get(), encoder.id, stream, _run(service, stream, encoder, body.num_bytes))
    return Response(encoder.begun("queued").body, 200, ignored_header(job.unknown), "application/json")


async def _run(service: Service, stream: Stream, encoder: ResponseEncoder, num_bytes: int) -> KeptResponse | None:
    """The response as it ended; None where it was cancelled or deleted."""
    try:
        answers = await collect(stream, _never)
        await service.offload.run(num_bytes + stream.num_tokens, lambda: encoder.body(stream, answers))
        return encoder.ended(stream)
    except ClientGone:
        return None
    except QuireError as error:
        return encoder.failed(stream, error)


async def _never() -> Message:
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never
