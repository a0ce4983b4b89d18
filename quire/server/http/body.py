"""A request's body."""

from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request

from quire.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType, shown
from quire.server.service.answers import ClientGoneEarly
from quire.server.service.service import Service
from quire.text.json_text import parse_json_text

_JSON_NAMES = {type(None): "null", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}


class Body(NamedTuple):
    """A body as a JSON object, and its length: work on large ones is done in a thread."""

    raw: dict[str, Any]
    num_bytes: int


async def read_json(service: Service, request: Request) -> Body:
    body = await _read(service, request)
    await service.arrival_turns.take()
    return Body(await service.offload.run(len(body), lambda: parse_json(body)), len(body))


def _check_type(given: str) -> None:
    """Refuse another type than JSON, as text-generation-inference does. A body without a type is read."""
    kind = given.partition(";")[0].strip().lower()
    if not (kind in ("", "application/json") or (kind.startswith("application/") and kind.endswith("+json"))):
        problem = f"Content-Type is {shown(given)}; it must be application/json"
        raise UnsupportedMediaType(problem, accept_post="application/json")


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        found = parse_json_text("body", body)
    except InvalidRequest as error:
        error.param = None  # the body is no field of itself
        raise
    if not isinstance(found, dict):
        raise InvalidRequest(f"body: a JSON {_JSON_NAMES[type(found)]}; it must be an object")
    return found


async def _read(service: Service, request: Request) -> bytes:
    """The whole body. Nothing beyond the limit is kept."""
    _check_type(request.headers.get("content-type", ""))
    encoding = request.headers.get("content-encoding", "")
    if encoding.lower() not in ("", "identity"):
        problem = f"Content-Encoding is {shown(encoding)}; only bodies that are not compressed are read"
        raise UnsupportedMediaType(problem, accept_encoding="identity")
    limit = service.settings.payload_limit
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise BodyTooLarge(f"body has {length} bytes; the limit is {limit}")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"body has more than {limit} bytes, which is the limit")
            parts.append(part)
    except ClientDisconnect:
        raise ClientGoneEarly from None
    return b"".join(parts)
