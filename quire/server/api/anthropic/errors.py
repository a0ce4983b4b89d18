"""Errors in Anthropic's shape."""

from math import ceil

import msgspec
from starlette.responses import Response

from quire.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    EngineFailed,
    EngineStopped,
    ForbiddenOrigin,
    InvalidRequest,
    ModelNotFound,
    NoSuchRoute,
    Overloaded,
    PromptTooLong,
    QuireError,
    RateLimited,
    Unauthorized,
    UnsupportedMediaType,
    WrongMethod,
)
from quire.server.api.anthropic.responses import AnthropicError, ErrorCode, ErrorType
from quire.server.caller import request_id

_HEADER = "request-id"  # as these clients call it; other APIs say x-request-id

_KINDS: tuple[tuple[type[QuireError], int, ErrorType], ...] = (  # the first that matches
    (Unauthorized, 401, "authentication_error"),
    (ForbiddenOrigin, 403, "permission_error"),
    (ModelNotFound, 404, "not_found_error"),
    (NoSuchRoute, 404, "not_found_error"),
    (WrongMethod, 405, "invalid_request_error"),
    (BodyTooLarge, 413, "request_too_large"),
    (UnsupportedMediaType, 415, "invalid_request_error"),
    (InvalidRequest, 400, "invalid_request_error"),
    (DeadlineExceeded, 504, "timeout_error"),
    (RateLimited, 429, "rate_limit_error"),
    (Overloaded, 529, "overloaded_error"),
    (EngineFailed, 529, "overloaded_error"),
    (EngineStopped, 529, "overloaded_error"),
    (QuireError, 500, "api_error"),
)


# By field: the codes that make clients retry without it.
_CODES: dict[str | None, ErrorCode] = {"thread": "thread_unsupported_request"}


def own_headers() -> dict[str, str]:
    """The headers of every answer."""
    return {_HEADER: request_id.get()}


def error_body(error: QuireError) -> AnthropicError:
    _, kind = _status_and_type(error)
    message = error.message
    if isinstance(error, PromptTooLong) and error.counts is not None:
        # Clients parse this wording to learn that they must shorten the conversation, and by how much.
        num_tokens, limit = error.counts
        message = f"prompt is too long: {num_tokens} tokens > {limit} maximum"
    body: AnthropicError = {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id.get(),
    }
    if error.param in _CODES:
        body["error"]["details"] = {"error_code": _CODES[error.param]}
    return body


def error_response(error: QuireError) -> Response:
    headers = own_headers()
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, ceil(error.retry_after_s)))
    status, _ = _status_and_type(error)
    return Response(msgspec.json.encode(error_body(error)), status, headers, "application/json")


def error_events(error: QuireError) -> bytes:
    """The last event of a stream that fails."""
    return b"event: error\ndata: " + msgspec.json.encode(error_body(error)) + b"\n\n"


def _status_and_type(error: QuireError) -> tuple[int, ErrorType]:
    return next((status, kind) for type_, status, kind in _KINDS if isinstance(error, type_))
