"""Whether it works, and how it is doing."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.exposition import CONTENT_TYPE, Exposition
from quire.server.service import Service


async def live(service: Service, request: Request) -> Response:
    """This process answers."""
    return Response()


async def ready(service: Service, request: Request) -> Response:
    """Requests would be answered."""
    reason = service.why_not_ready
    return Response() if reason is None else unhealthy(reason)


def unhealthy(reason: str) -> Response:
    body = {"error": "unhealthy", "error_type": "healthcheck", "reason": reason}
    return Response(msgspec.json.encode(body), 503, media_type="application/json")


async def metrics(service: Service, request: Request) -> Response:
    page = Exposition()
    service.metrics.write(page)
    return Response(page.text(), headers={"content-type": CONTENT_TYPE})
