"""The dialect of the Anthropic routes."""

from quire.server.api.anthropic.errors import error_events, error_response
from quire.server.api.anthropic.responses import AnthropicError
from quire.server.api.dialect import Dialect

ANTHROPIC = Dialect(error_body=AnthropicError, error_response=error_response, error_events=error_events)
