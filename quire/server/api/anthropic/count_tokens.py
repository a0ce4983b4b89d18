"""POST /v1/messages/count_tokens."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api.anthropic.chat_request import Translation
from quire.server.api.anthropic.errors import own_headers
from quire.server.api.anthropic.requests import REFUSALS, CountTokensRequest
from quire.server.api.anthropic.responses import TokenCount
from quire.server.api.chat import encode_chat
from quire.server.api.field_names import named_by
from quire.server.api.job import ignored_header
from quire.server.api.openai.tools import tool_use
from quire.server.api.validation import typed
from quire.server.http.body import Body, read_json
from quire.server.service.service import Service


async def count_tokens(service: Service, request: Request) -> Response:
    body = await read_json(service, request)
    count, unknown = await service.offload.run(body.num_bytes, lambda: _count(service, body))
    headers = {**own_headers(), **ignored_header(unknown)}
    return Response(msgspec.json.encode(count), 200, headers, "application/json")


def _count(service: Service, body: Body) -> tuple[TokenCount, list[str]]:
    """The number of tokens, and the fields that the API does not know."""
    strict = service.settings.strict
    fields, unknown = typed(body.raw, CountTokensRequest, REFUSALS, strict=strict)
    translation = Translation(fields, service.model.max_total_tokens)
    if strict:
        translation.unknown.refuse()
    with named_by(translation.own_name):
        service.model.check_name(fields.model)
        _, tokens = encode_chat(service, translation.chat, tool_use(translation.chat, service.model))
    count: TokenCount = {"input_tokens": len(tokens)}
    if fields.context_management is not None:
        count["context_management"] = {"original_input_tokens": len(tokens)}
    return count, [*unknown, *translation.unknown.names]
