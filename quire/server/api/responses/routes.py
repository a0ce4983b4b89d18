"""The routes of responses."""

from dataclasses import replace
from functools import partial

from quire.server.api.openai.dialect import OPENAI
from quire.server.api.responses import resources
from quire.server.api.responses.create import count_input_tokens, create_response
from quire.server.api.responses.items import item_schema
from quire.server.api.responses.requests import ResponseRequest
from quire.server.api.responses.stored import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    cancel_response,
    delete_response,
    get_response,
    list_input_items,
)
from quire.server.http.route import Route

RESPONSES = replace(OPENAI)  # a value of its own: text-generation-inference has no such routes to imitate
_EXAMPLE = '{"input": "Hello", "max_output_tokens": 32}'
_ONE = "/v1/responses/{response_id}"
_INPUT = ("input", {"anyOf": [{"type": "string"}, {"type": "array", "items": item_schema()}]})
_PAGING = (
    ("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}),
    ("order", {"enum": ["asc", "desc"], "default": "desc"}),
    ("after", {"type": "string"}),
)
_route = partial(Route, dialect=RESPONSES)
ROUTES = (
    _route(
        "POST", "/v1/responses", create_response, body=(ResponseRequest,), answer=(resources.Response,),
        events=resources.EVENTS, example=_EXAMPLE, open_fields=(_INPUT,), generates=True,
    ),
    _route(
        "POST", "/v1/responses/input_tokens", count_input_tokens, body=(ResponseRequest,),
        answer=(resources.InputTokens,), example=_EXAMPLE, open_fields=(_INPUT,),
    ),
    _route("GET", _ONE, get_response, answer=(resources.Response,), query=(("stream", {"const": False}),)),
    _route("DELETE", _ONE, delete_response, answer=(resources.DeletedResponse,)),
    _route("POST", f"{_ONE}/cancel", cancel_response, answer=(resources.Response,)),
    _route("GET", f"{_ONE}/input_items", list_input_items, answer=(resources.ItemList,), query=_PAGING),
)  # fmt: skip
