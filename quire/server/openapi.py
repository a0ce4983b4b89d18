"""The OpenAPI document, made of the types that requests are checked with."""

import re
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.server.openai.requests import ChatRequest, CompletionRequest
from quire.server.service import Service
from quire.server.tgi.kserve import InferRequest
from quire.server.tgi.requests import GenerateRequest, Parameters, TokenizeRequest
from quire.server.tgi.tokenize import DetokenizeRequest, PromptTokenizeRequest
from quire.server.tgi.vertex import VertexRequest

# Bodies by route. Several types: any of them.
BODIES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/": (GenerateRequest,),
    "/generate": (GenerateRequest,),
    "/generate_stream": (GenerateRequest,),
    "/invocations": (GenerateRequest, ChatRequest, CompletionRequest),
    "/tokenize": (TokenizeRequest, PromptTokenizeRequest),
    "/chat_tokenize": (ChatRequest,),
    "/detokenize": (DetokenizeRequest,),
    "/vertex": (VertexRequest,),
    "/v2/models/{model}/versions/{version}/infer": (InferRequest,),
}
# What GET routes answer with; None for nothing.
QUESTIONS = {
    "/v1/models": "application/json",
    "/info": "application/json",
    "/health/generate": "application/json",
    "/metrics": "text/plain",
    "/docs": "text/html",
    "/v1/models/{model}": "application/json",
    "/v2": "application/json",
    "/v2/health/live": "application/json",
    "/v2/health/ready": "application/json",
    "/v2/models/{model}/versions/{version}": "application/json",
    "/v2/models/{model}/versions/{version}/ready": "application/json",
    "/health": None,
    "/health/live": None,
    "/ping": None,
}
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/", "/generate_stream", "/invocations")
_STATUSES = {
    "200": "the answer",
    "400": "a field is wrong",
    "401": "the key is missing or wrong",
    "404": "there is no such model",
    "413": "the body is too long",
    "422": "a field is wrong",
    "424": "the work of this request fails",
    "429": "too many requests; Retry-After says when to try again",
    "500": "the work of this request fails",
    "503": "the engine is not ready",
    "504": "the request took too long",
}
_REF = "#/components/schemas/{name}"


async def openapi(service: Service, request: Request) -> Response:
    return Response(msgspec.json.encode(document()), media_type="application/json")


@cache
def document() -> dict[str, Any]:
    structs = {struct for body in BODIES.values() for struct in body} | {Parameters}
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REF)
    # The body's own type leaves them open, so that each is checked and named by itself.
    schemas["GenerateRequest"]["properties"]["parameters"] = {
        "anyOf": [{"$ref": _REF.format(name="Parameters")}, {"type": "null"}],
        "default": None,
    }
    paths: dict[str, Any] = {path: {"post": _operation(path, body)} for path, body in BODIES.items()}
    for path, content_type in QUESTIONS.items():
        content: dict[str, Any] = {} if content_type is None else {"content": {content_type: {"schema": {}}}}
        responses = {"200": {"description": "the answer", **content}, "503": _response("503")}
        if "{model}" in path:
            responses["404"] = _response("404")
        paths[path] = {"get": {"responses": responses}}
    for path, methods in paths.items():
        names = re.findall(r"{(\w+)}", path)
        for operation in methods.values():
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, body: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    schemas = [{"$ref": _REF.format(name=struct.__name__)} for struct in body]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    responses = {code: _response(code) for code in _STATUSES}
    if path in _STREAMS:
        responses["200"]["content"]["text/event-stream"] = {"schema": {}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": responses,
    }


def _response(code: str) -> dict[str, Any]:
    return {"description": _STATUSES[code], "content": {"application/json": {"schema": {}}}}
