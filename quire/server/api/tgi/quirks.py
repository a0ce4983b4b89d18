"""--tgi-strict: what text-generation-inference does where that is wrong or unusual, done the same way."""

from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from quire.errors import InvalidRequest, QuireError
from quire.request import FinishReason as Finish
from quire.server.api.openai.requests import ChatRequest, Sampled
from quire.server.api.openai.responses import FinishReason
from quire.server.api.tgi.errors import error_body
from quire.server.service.service import Service

T = TypeVar("T", bound=Sampled)

CHAT_FINISH_REASONS: dict[Finish, FinishReason] = {
    Finish.END: "stop",
    Finish.STOP_TOKEN: "stop_sequence",
    Finish.STOP_STRING: "stop_sequence",
    Finish.LENGTH: "length",
}
COMPLETION_FINISH_REASONS: dict[Finish, FinishReason] = CHAT_FINISH_REASONS | {Finish.END: "eos_token"}
_UNREAD = ("n", "logit_bias")  # of a chat


def as_read(fields: T) -> tuple[T, list[str]]:
    """An OpenAI request as it is understood there, and the names of fields that are given and not read."""
    check_strictly(fields.top_p, fields.temperature or None, None, None, fields.seed)
    if not isinstance(fields, ChatRequest):
        return fields, []
    unread = [name for name in _UNREAD if getattr(fields, name) is not None]
    changes: dict[str, Any] = dict.fromkeys(unread)
    if fields.presence_penalty is not None:
        changes |= {"presence_penalty": None, "repetition_penalty": fields.presence_penalty + 2.0}
    return msgspec.structs.replace(fields, **changes), unread


def vertex_parameters(given: Any) -> dict[str, Any]:
    """Of an instance's parameters only these are read, and it is always sampled."""
    read = {name: given[name] for name in ("max_new_tokens", "seed") if isinstance(given, dict) and name in given}
    return read | {"do_sample": True}


def check_strictly(
    top_p: float | None, temperature: float | None, typical_p: float | None, top_k: int | None, seed: int | None
) -> None:
    """What is refused although it means something."""
    for name, value in (("top_p", top_p), ("typical_p", typical_p)):
        if value is not None and not 0 < value < 1:
            raise InvalidRequest.for_field(name, f"is {value}; it must be above 0 and below 1")
    if temperature is not None and temperature <= 0:
        raise InvalidRequest.for_field("temperature", f"is {temperature}; it must be above 0")
    if top_k is not None and top_k <= 0:
        raise InvalidRequest.for_field("top_k", f"is {top_k}; it must be above 0")
    if seed is not None and seed < 0:
        raise InvalidRequest.for_field("seed", f"is {seed}; it must be at least 0")


def openai_event(error: QuireError) -> bytes:
    """An error in an OpenAI stream, whatever its cause."""
    return b"data: " + msgspec.json.encode({"error": {"message": error.message, "http_status_code": 422}}) + b"\n\n"


async def as_event(service: Service, answering: Awaitable[Response], *, native: bool) -> Response:
    """A stream that is refused is a stream all the same."""
    try:
        return await answering
    except QuireError as error:
        service.metrics.note_error(error)
        return refused_stream(error, native=native)


def refused_stream(error: QuireError, *, native: bool) -> Response:
    """Status 200, and the error as the only event."""
    if native:
        body = b"data:" + msgspec.json.encode(error_body(error)) + b"\n\n"
    else:
        body = openai_event(error) + b"data: [DONE]\n\n"
    return Response(body, 200, {"cache-control": "no-cache", "x-accel-buffering": "no"}, "text/event-stream")
