"""Errors in OpenAI's shape."""

from math import ceil

import msgspec
from starlette.responses import Response

from quire.errors import (
    EngineFailed,
    EngineStopped,
    ForbiddenOrigin,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    QuireError,
    RequestFailed,
    TemplateFailed,
    Unauthorized,
)
from quire.server.api.openai.responses import ErrorType, OpenAIError


def status_of(error: QuireError) -> int:
    if type(error) in (InvalidRequest, PromptTooLong, TemplateFailed):
        return 400
    return 500 if isinstance(error, RequestFailed) else error.status


def error_body(error: QuireError) -> OpenAIError:
    return {"error": {"message": error.message, "type": _type_of(error), "param": error.param, "code": _code_of(error)}}


def error_response(error: QuireError) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, ceil(error.retry_after_s)))}
    return Response(msgspec.json.encode(error_body(error)), status_of(error), headers, "application/json")


def error_events(error: QuireError) -> bytes:
    """The last event of a stream that fails."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"


def _type_of(error: QuireError) -> ErrorType:
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, ForbiddenOrigin):
        return "permission_error"
    if isinstance(error, InvalidRequest):
        return "invalid_request_error"
    if isinstance(error, Overloaded):
        return "rate_limit_error"
    return "service_unavailable_error" if isinstance(error, (EngineFailed, EngineStopped)) else "server_error"


def _code_of(error: QuireError) -> str | None:
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    if isinstance(error, Unauthorized):
        return "invalid_api_key"
    return None if type(error) is InvalidRequest else error.kind
