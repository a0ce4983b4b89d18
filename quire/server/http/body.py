"""A request's body."""

from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request

from quire.errors import BodyTooLarge
from quire.server.api.validation import parse_json
from quire.server.service.answers import ClientGone
from quire.server.service.service import Service


class Body(NamedTuple):
    """A body as a JSON object, and its length, by which work on it is done in a thread or not."""

    raw: dict[str, Any]
    num_bytes: int


async def read_json(service: Service, request: Request) -> Body:
    body = await _read(service, request)
    return Body(await service.offload.run(len(body), lambda: parse_json(body)), len(body))


async def _read(service: Service, request: Request) -> bytes:
    """All of it, if it is not too long; nothing beyond the limit is kept."""
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
        raise ClientGone from None
    return b"".join(parts)
