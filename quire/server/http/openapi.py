"""The OpenAPI document, made of the types that requests are checked with and answers are built as."""

import re
from functools import cache
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.openai.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ModelCard,
    ModelList,
    OpenAIError,
)
from quire.server.api.tgi.kserve import InferInput, InferOutput, InferRequest
from quire.server.api.tgi.requests import GenerateRequest, Parameters, TokenizeRequest
from quire.server.api.tgi.responses import (
    ChatTokenized,
    Detokenized,
    Generated,
    GeneratedToken,
    Inferred,
    Info,
    KServeLive,
    KServeServer,
    Predictions,
    TGIError,
    Tokenized,
    TokenSpan,
)
from quire.server.api.tgi.tokenize import DetokenizeRequest, PromptTokenizeRequest
from quire.server.api.tgi.vertex import VertexRequest
from quire.server.http.access import OPEN_PATHS
from quire.server.observe.health import Generates, Unhealthy
from quire.server.service.service import Service

Types = tuple[Any, ...]


class Operation(NamedTuple):
    """Types of what is sent and answered. Several: any of them; none: nothing."""

    answer: Types = ()  # of a whole answer, as JSON
    body: Types = ()
    event: Types = ()  # of each event of a stream
    generates: bool = False  # and so may be refused, fail or take too long
    is_openai: bool = False  # errors have OpenAI's shape
    media_type: str = "application/json"


_COMPLETION = Operation((Completion,), (CompletionRequest,), (CompletionChunk, OpenAIError), True, True)
_CHAT = Operation((ChatCompletion,), (ChatRequest,), (ChatCompletionChunk, OpenAIError), True, True)
_EVENTS = (GeneratedToken, TGIError)
POST: dict[str, Operation] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/": Operation((list[Generated],), (GenerateRequest,), _EVENTS, True),
    "/generate": Operation((Generated,), (GenerateRequest,), generates=True),
    "/generate_stream": Operation(body=(GenerateRequest,), event=_EVENTS, generates=True),
    "/invocations": Operation(
        (list[Generated], ChatCompletion, Completion),
        (GenerateRequest, ChatRequest, CompletionRequest),
        (*_EVENTS, ChatCompletionChunk, CompletionChunk, OpenAIError),
        True,
    ),
    "/tokenize": Operation((list[TokenSpan], Tokenized), (TokenizeRequest, PromptTokenizeRequest)),
    "/chat_tokenize": Operation((ChatTokenized,), (ChatRequest,)),
    "/detokenize": Operation((Detokenized,), (DetokenizeRequest,)),
    "/vertex": Operation((Predictions,), (VertexRequest,), generates=True),
    "/v2/models/{model}/versions/{version}/infer": Operation((Inferred,), (InferRequest,), generates=True),
}
GET: dict[str, Operation] = {
    "/v1/models": Operation((ModelList,), is_openai=True),
    "/v1/models/{model}": Operation((ModelCard,), is_openai=True),
    "/info": Operation((Info,)),
    "/health": Operation(),
    "/health/live": Operation(),
    "/health/generate": Operation((Generates,)),
    "/ping": Operation(),
    "/metrics": Operation((str,), media_type="text/plain"),
    "/docs": Operation((str,), media_type="text/html"),
    "/v2": Operation((KServeServer,)),
    "/v2/health/live": Operation((KServeLive,)),
    "/v2/health/ready": Operation((KServeLive,)),
    "/v2/models/{model}/versions/{version}": Operation((KServeServer,)),
    "/v2/models/{model}/versions/{version}/ready": Operation((KServeLive,)),
}
_STATUSES = {
    "400": "a field is wrong",
    "401": "the key is missing or wrong",
    "404": "there is no such model",
    "413": "the body is too long",
    "422": "a field is wrong",
    "424": "the work of this request fails",
    "429": "too many requests; Retry-After says when to try again",
    "500": "the work of this request fails, or the server has a defect",
    "503": "the engine is not ready",
    "504": "the request took too long",
}
_STREAM = "with `stream` server-sent events"
_TGI_STRICT = ", with --tgi-strict"
_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _TOKENS,
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}
_REF = "#/components/schemas/{name}"


async def openapi(service: Service, request: Request) -> Response:
    return Response(msgspec.json.encode(document()), media_type="application/json")


@cache
def document() -> dict[str, Any]:
    operations = {(path, "post"): one for path, one in POST.items()} | {(path, "get"): one for path, one in GET.items()}
    types = {each for one in operations.values() for each in (*one.answer, *one.body, *one.event)}
    ordered = sorted(types | {Parameters, InferInput, InferOutput, Unhealthy, OpenAIError, TGIError}, key=str)
    found, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schemas = dict(zip(ordered, found, strict=True))
    # The bodies' own types leave these open, so that each part is checked and named by itself.
    components["GenerateRequest"]["properties"]["parameters"] = {
        "anyOf": [{"$ref": _REF.format(name="Parameters")}, {"type": "null"}],
        "default": None,
    }
    components["InferRequest"]["properties"]["inputs"]["items"] = {"$ref": _REF.format(name="InferInput")}
    components["InferRequest"]["properties"]["outputs"]["items"] = {"$ref": _REF.format(name="InferOutput")}
    components["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), operation in operations.items():
        paths.setdefault(path, {})[method] = _described(path, method, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _described(path: str, method: str, operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer:
        content[operation.media_type] = {"schema": _any_of(operation.answer, schemas)}
    if operation.event:
        content["text/event-stream"] = {"schema": _event(_any_of(operation.event, schemas), operation)}
    answered: dict[str, Any] = {"description": f"the answer; {_STREAM}" if operation.event else "the answer"}
    responses = {"200": answered | ({"content": content} if content else {})}
    for status, (description, error) in _errors(path, method, operation).items():
        schema = _any_of(error, schemas)
        responses[status] = {"description": description, "content": {"application/json": {"schema": schema}}}
    names = re.findall(r"{(\w+)}", path)
    described: dict[str, Any] = {
        "operationId": "_".join([method, *re.findall(r"\w+", path)]),
        "parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names],
        "responses": responses,
    }
    if operation.body:
        body = _any_of(operation.body, schemas)
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


def _event(schema: Any, operation: Operation) -> dict[str, Any]:
    """Of each event: an object with the data as text, which is JSON, as OpenAPI 3.2 has it too."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    if operation.event != _EVENTS:
        data = {"anyOf": [{"const": "[DONE]"}, data]}  # the last of OpenAI's streams
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _any_of(types: Types, schemas: dict[Any, Any]) -> Any:
    return schemas[types[0]] if len(types) == 1 else {"anyOf": [schemas[each] for each in types]}


def _errors(path: str, method: str, operation: Operation) -> dict[str, tuple[str, Types]]:
    """By status: the description, and the types that the body may have."""
    own: Types = (OpenAIError,) if operation.is_openai else (TGIError,)
    statuses: dict[str, Types] = {"500": own, "503": (*own, Unhealthy)}
    if path not in OPEN_PATHS:
        statuses["401"] = (OpenAIError,)
    if method == "post":
        statuses |= {"404": own, "413": own, "422": (TGIError,)}
        if operation.is_openai:
            statuses["400"] = own
    if operation.generates:
        statuses |= {"424": (TGIError,), "429": own, "504": own}
    if "{model}" in path:
        statuses["404"] = tuple(dict.fromkeys((*own, OpenAIError)))  # the latter where it is no path at all
    return {
        status: (
            _STATUSES[status] + (_TGI_STRICT if operation.is_openai and status in ("422", "424") else ""),
            statuses[status],
        )
        for status in sorted(statuses)
    }
