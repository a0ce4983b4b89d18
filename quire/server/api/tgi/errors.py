"""Errors in text-generation-inference's shape."""

from math import ceil

import msgspec
from starlette.responses import Response

from quire.errors import (
    ENGINES_FAILURES,
    EngineFailed,
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
    return "generation" if isinstance(error, ENGINES_FAILURES) else "incomplete_generation"


def status_of(error: QuireError) -> int:
    """An engine that failed is 424, as there, where sending the request again would not help."""
    return RequestFailed.status if isinstance(error, EngineFailed) and error.retry_after_s is None else error.status


def error_body(error: QuireError) -> TGIError:
    return {"error": error.message, "error_type": error_type(error)}


def error_events(error: QuireError) -> bytes:
    """The last event of a stream that fails."""
    return b"data:" + msgspec.json.encode(error_body(error)) + b"\n\n"


def error_response(error: QuireError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, ceil(error.retry_after_s)))}
    return Response(msgspec.json.encode(error_body(error)), status_of(error), headers, "application/json")
