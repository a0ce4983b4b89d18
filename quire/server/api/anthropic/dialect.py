"""The dialect of the Anthropic routes."""

from collections.abc import Iterable

from quire.server.api.anthropic.errors import error_events, error_response
from quire.server.api.anthropic.responses import AnthropicError
from quire.server.api.dialect import Dialect

VERSION = "anthropic-version"  # identifies clients of this API on routes that several APIs have
ANTHROPIC = Dialect(error_body=AnthropicError, error_response=error_response, error_events=error_events)


def is_anthropic(path: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True for a request of a client of this API."""
    return path.startswith("/v1/messages") or any(name == VERSION.encode() for name, _ in headers)
