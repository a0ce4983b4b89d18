"""Errors in text-generation-inference's shape."""

from math import ceil

import msgspec
from starlette.responses import Response

from quire.errors import (
    EngineFailed,
    EngineStopped,
    InvalidRequest,
    Overloaded,
    QuireError,
    RequestFailed,
    TemplateFailed,
)
from quire.server.api.tgi.responses import ErrorType, TGIError


def error_type(error: QuireError) -> ErrorType:
    if isinstance(error, InvalidRequest):
        return "template_error" if isinstance(error, TemplateFailed) else "validation"
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, RequestFailed):
        return "generation"
    return "healthcheck" if isinstance(error, (EngineFailed, EngineStopped)) else "incomplete_generation"


def error_body(error: QuireError) -> TGIError:
    return {"error": error.message, "error_type": error_type(error)}


def error_events(error: QuireError) -> bytes:
    """The last event of a stream that fails."""
    return b"data:" + msgspec.json.encode(error_body(error)) + b"\n\n"


def error_response(error: QuireError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, ceil(error.retry_after_s)))}
    return Response(msgspec.json.encode(error_body(error)), error.status, headers, "application/json")
