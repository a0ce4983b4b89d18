"""The routes of the Anthropic API."""

from functools import partial

from quire.server.api.anthropic import responses
from quire.server.api.anthropic.count_tokens import count_tokens
from quire.server.api.anthropic.dialect import ANTHROPIC
from quire.server.api.anthropic.messages import messages
from quire.server.api.anthropic.requests import CountTokensRequest, MessagesRequest
from quire.server.http.route import Route

_EXAMPLE = '{"model": "default", "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}'
_COUNT_EXAMPLE = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}'
_EVENTS = (
    responses.MessageStart, responses.BlockStart, responses.BlockDelta, responses.BlockStop, responses.MessageDelta,
    responses.MessageStop, responses.Ping, responses.AnthropicError,
)  # fmt: skip

_post = partial(Route, "POST", dialect=ANTHROPIC)
ROUTES = (
    _post(
        "/v1/messages", messages, body=(MessagesRequest,), answer=(responses.AnthropicMessage,), events=_EVENTS,
        example=_EXAMPLE, generates=True,
    ),
    _post(
        "/v1/messages/count_tokens", count_tokens, body=(CountTokensRequest,), answer=(responses.TokenCount,),
        example=_COUNT_EXAMPLE,
    ),
)  # fmt: skip
