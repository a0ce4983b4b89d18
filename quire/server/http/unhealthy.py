"""The answer of a server that would not answer requests."""

from typing import Literal, TypedDict

import msgspec


class Unhealthy(TypedDict):
    """The reason why requests would not be answered."""

    error: Literal["unhealthy"]
    error_type: Literal["healthcheck"]
    reason: str


def unhealthy_json(reason: str) -> bytes:
    body: Unhealthy = {"error": "unhealthy", "error_type": "healthcheck", "reason": reason}
    return msgspec.json.encode(body)
