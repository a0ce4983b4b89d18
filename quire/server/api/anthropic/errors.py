"""Errors in Anthropic's shape."""

import secrets
from math import ceil

import msgspec
from starlette.responses import Response

from quire.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    EngineFailed,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    NoSuchRoute,
    Overloaded,
    PromptTooLong,
    QuireError,
    Unauthorized,
    WrongMethod,
)
from quire.server.api.anthropic.responses import AnthropicError, ErrorType

REQUEST_ID = "request-id"  # the header

_KINDS: tuple[tuple[type[QuireError], int, ErrorType], ...] = (  # the first that matches
    (Unauthorized, 401, "authentication_error"),
    (ModelNotFound, 404, "not_found_error"),
    (NoSuchRoute, 404, "not_found_error"),
    (WrongMethod, 405, "invalid_request_error"),
    (BodyTooLarge, 413, "request_too_large"),
    (InvalidRequest, 400, "invalid_request_error"),
    (DeadlineExceeded, 504, "timeout_error"),
    (Overloaded, 529, "overloaded_error"),
    (EngineFailed, 529, "overloaded_error"),
    (EngineStopped, 529, "overloaded_error"),
    (QuireError, 500, "api_error"),
)


def new_request_id() -> str:
    return f"req_{secrets.token_hex(12)}"


def error_body(error: QuireError, request_id: str) -> AnthropicError:
    _, kind = _status_and_type(error)
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {message}"  # the words that clients look for when they shorten a conversation
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_response(error: QuireError) -> Response:
    request_id = new_request_id()
    headers = {REQUEST_ID: request_id}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, ceil(error.retry_after_s)))
    status, _ = _status_and_type(error)
    return Response(msgspec.json.encode(error_body(error, request_id)), status, headers, "application/json")


def error_events(error: QuireError) -> bytes:
    """The last event of a stream that fails."""
    return error_event(error, new_request_id())


def error_event(error: QuireError, request_id: str) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(error_body(error, request_id)) + b"\n\n"


def _status_and_type(error: QuireError) -> tuple[int, ErrorType]:
    return next((status, kind) for type_, status, kind in _KINDS if isinstance(error, type_))
