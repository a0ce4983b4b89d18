"""The path of a request through any API: parsed into a job, run by the service, encoded in the API's format."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QuireError
from quire.server.api.dialect import Dialect
from quire.server.http.body import Body
from quire.server.http.sse import EVENT_HEADERS, EventEncoder, EventStream, first_deltas
from quire.server.service.answers import Answer, ClientGone, collect
from quire.server.service.arrival import Arrival
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.service import Service
from quire.server.service.stream import Stream

log = logging.getLogger(__name__)

MAX_NAMES = 20  # unknown fields in the log and in a header
MAX_NAME = 60  # characters of each


# Builds the body of a whole answer from the stream and its answers by prompt and sample. May run in a thread.
WriteBody = Callable[[Stream, list[list[Answer]]], Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A parsed request."""

    specs: list[GenerationSpec]
    body: WriteBody
    events: Callable[[Stream], EventEncoder] | None = (
        None  # of a streamed answer; None: the route has whole answers only
    )
    # Awaited before the end of a complete answer is sent. False: the answer changes, since it could not be kept.
    keep: Callable[[Stream], Awaitable[bool]] | None = None
    num_characters: int  # of the prompts
    num_top: int = 0  # alternatives that the answer shows for each token
    unknown: Sequence[str] = ()  # fields that the API does not know
    user: str | None = None
    wants_timings: bool = False
    sequences_field: str = "n"  # the field that sets the number of sequences
    has_timing_headers: bool = True


D = TypeVar("D", bound=Dialect)
Parse = Callable[[Service, D, Arrival, dict[str, Any]], Job]  # cost grows with the body, so it may run in a thread


async def answer(
    service: Service, request: Request, body: Body, parse: Parse[D], dialect: D, *, name: str, streams: bool = False
) -> Response:
    """`name` is the name of the request's span."""
    arrival = Arrival(request.headers, name)
    arrival.status_of = lambda error: dialect.error_response(error).status_code
    try:
        job = await service.offload.run(body.num_bytes, lambda: parse(service, dialect, arrival, body.raw))
        arrival.wants_timings |= job.wants_timings
        await service.grammar_check.check(job.specs, arrival.times)
        stream = service.open(job.specs, arrival, user=job.user, field=job.sequences_field)
        try:
            return await _response(job, stream, request, streams=streams)
        except (QuireError, ClientGone):
            raise
        except Exception as defect:
            raise stream.broken_off(defect) from None
    except QuireError as error:
        if not (streams and dialect.streams_refusals):
            raise
        if service.metrics.note_error(error):
            service.refusals.note(request.scope["route"].title, 200, error)
        return Response(dialect.error_events(error), 200, EVENT_HEADERS, "text/event-stream")


async def _response(job: Job, stream: Stream, request: Request, *, streams: bool) -> Response:
    headers = ignored_header(job.unknown)
    if not streams:
        return await _whole(job, stream, request, headers)
    assert job.events is not None, "this route has whole answers only"
    events = job.events(stream)
    return EventStream(stream, events, await first_deltas(stream, request.receive), headers, job.keep)


async def _whole(job: Job, stream: Stream, request: Request, headers: dict[str, str]) -> Response:
    answers = await collect(stream, request.receive)
    if job.has_timing_headers:
        headers |= _timing_headers(stream, job.num_characters)
    num_bytes = job.num_characters + (stream.num_prompt_tokens + stream.num_tokens) * (1 + job.num_top)

    async def write() -> bytes:
        return await stream.service.offload.run(num_bytes, lambda: msgspec.json.encode(job.body(stream, answers)))

    content = await write()
    if job.keep is not None and not await job.keep(stream):
        content = await write()
    return Response(content, 200, headers, "application/json")


def _timing_headers(stream: Stream, num_characters: int) -> dict[str, str]:
    """The times of the request, in milliseconds; x-compute-time is in seconds."""
    times = stream.times
    return {
        "x-compute-type": stream.service.settings.compute_type or stream.service.platform,
        "x-compute-time": f"{times.total_s:.6f}",
        "x-compute-characters": str(num_characters),
        "x-total-time": _ms(times.total_s),
        "x-validation-time": _ms(times.validation_s),
        "x-queue-time": _ms(times.queue_s),
        "x-inference-time": _ms(times.inference_s),
        "x-time-per-token": _ms(times.per_token_s(stream.num_tokens)),
        "x-prompt-tokens": str(stream.num_prompt_tokens),
        "x-generated-tokens": str(stream.num_tokens),
    }


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that lists the unknown fields of a request, escaped."""
    if not names:
        return {}
    cut = [name[:MAX_NAME] for name in names[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    log.warning("fields that no route knows were ignored: %s%s", ", ".join(map(repr, cut)), more)
    safe = ["".join(c for c in name if c.isascii() and c.isprintable()) for name in cut]
    return {"x-quire-ignored-fields": ",".join(safe)}
