"""The answer of a server that would not answer requests."""

from typing import Literal, TypedDict

import msgspec
from starlette.responses import Response


class Unhealthy(TypedDict):
    """The reason why requests would not be answered."""

    error: Literal["unhealthy"]
    error_type: Literal["healthcheck"]
    reason: str


def unhealthy(reason: str, headers: dict[str, str] | None = None) -> Response:
    body: Unhealthy = {"error": "unhealthy", "error_type": "healthcheck", "reason": reason}
    return Response(msgspec.json.encode(body), 503, headers, "application/json")
