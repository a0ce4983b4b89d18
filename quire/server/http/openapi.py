"""The OpenAPI document, generated from the types of requests and answers."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from quire import __version__
from quire.server.api.anthropic.responses import AnthropicError
from quire.server.api.openai.responses import OpenAIError
from quire.server.api.tgi.responses import TGIError
from quire.server.http.route import Route, Types
from quire.server.http.unhealthy import Unhealthy

_STATUSES = {
    "400": "a field is wrong",
    "401": "the key is missing or wrong",
    "403": "a web page of another origin sends it",
    "404": "there is no such model",
    "413": "the body is too long",
    "415": "the body is not JSON by its Content-Type, or compressed",
    "422": "a field is wrong",
    "424": "the work of this request fails",
    "429": "too many requests; Retry-After says when to try again",
    "500": "the work of this request fails, or the server has a defect",
    "503": "the engine is not ready",
    "504": "the request took too long",
    "529": "too many requests, or the engine is not ready; Retry-After says when to try again",
}
_STREAM = "with `stream` server-sent events"
_TGI_STRICT = ", with --tgi-strict"
_REF = "#/components/schemas/{name}"


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    documented = [route for route in routes if route.is_documented]
    types = {each for route in documented for each in (*route.answer, *route.body, *route.events)}
    types |= {held for route in documented for _, held in route.open_fields if not isinstance(held, dict)}
    ordered = sorted(types | {Unhealthy, OpenAIError, TGIError}, key=str)
    found, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schemas = dict(zip(ordered, found, strict=True))
    for body, (name, held) in (
        (body, field) for route in documented for body in route.body for field in route.open_fields
    ):
        if name in body.__struct_fields__:
            components[body.__name__]["properties"][name] |= held if isinstance(held, dict) else schemas[held]
    _complete(components)
    paths: dict[str, dict[str, Any]] = {}
    for route in documented:
        paths.setdefault(route.path, {})[route.method.lower()] = _described(route, schemas)
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


def _complete(schema: Any) -> None:
    """Add the fields that client generators need and the library leaves out: items of lists, types of booleans."""
    children = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    for child in children:
        _complete(child)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and "prefixItems" not in schema:
        schema.setdefault("items", {})
    if isinstance(schema.get("enum"), list) and all(isinstance(value, bool) for value in schema["enum"]):
        schema["type"] = "boolean"


def _described(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer:
        content[route.media_type] = {"schema": _any_of(route.answer, schemas)}
    if route.events:
        content["text/event-stream"] = {"schema": _event(route, schemas)}
    answered: dict[str, Any] = {"description": f"the answer; {_STREAM}" if route.events else "the answer"}
    responses = {"200": answered | ({"content": content} if content else {})}
    for status, types in sorted(_errors(route).items()):
        is_strict = route.dialect.error_body is OpenAIError and status in ("422", "424")
        responses[status] = {
            "description": _STATUSES[status] + (_TGI_STRICT if is_strict else ""),
            "content": {"application/json": {"schema": _any_of(types, schemas)}},
        }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in route.query]
    described: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *(re.findall(r"\w+", route.path) or ["root"])]),
        "parameters": parameters,
        "responses": responses,
    }
    if route.body:
        body = {"schema": _any_of(route.body, schemas), "example": msgspec.json.decode(route.example)}
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
    return described


def _event(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    """Each event is an object. Its data is a string that holds JSON, as in OpenAPI 3.2."""
    schema = _any_of(route.events, schemas)
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    if OpenAIError in route.events:
        data = {"anyOf": [{"const": "[DONE]"}, data]}  # the last of OpenAI's streams
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _any_of(types: Types, schemas: dict[Any, Any]) -> Any:
    return schemas[types[0]] if len(types) == 1 else {"anyOf": [schemas[each] for each in types]}


def _errors(route: Route) -> dict[str, Types]:
    """The types that the bodies of errors may have, by status."""
    own: Types = (route.dialect.error_body,)
    if AnthropicError in own:
        return dict.fromkeys(("400", "401", "403", "404", "413", "415", "429", "500", "504", "529"), own)
    statuses: dict[str, Types] = {"403": (OpenAIError,), "500": own, "503": (*own, Unhealthy)}
    if not route.is_open:
        statuses["401"] = (OpenAIError,)
    if route.method == "POST":
        statuses |= {"404": own, "413": own, "415": own, "422": (TGIError,)}
        if OpenAIError in own:
            statuses["400"] = own
    if route.query:
        statuses["400"] = own
    if route.generates:
        statuses |= {"424": (TGIError,), "429": own, "504": own}
    if "{" in route.path:
        statuses["404"] = tuple(dict.fromkeys((*own, OpenAIError)))  # the latter where no route matches
    return statuses
