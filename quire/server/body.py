"""A request's body."""

from starlette.requests import ClientDisconnect, Request

from quire.server.answers import ClientGone
from quire.server.openai.errors import BodyTooLarge
from quire.server.service import Service


async def read_body(service: Service, request: Request) -> bytes:
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
