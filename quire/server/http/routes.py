"""All routes: those of each API, and those for operators and browsers."""

from functools import cache, partial, wraps
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire.server.api.anthropic import models as anthropic_models
from quire.server.api.anthropic.dialect import VERSION
from quire.server.api.anthropic.responses import AnthropicModel, AnthropicModelList
from quire.server.api.anthropic.routes import ROUTES as ANTHROPIC_ROUTES
from quire.server.api.openai.dialect import OPENAI
from quire.server.api.openai.routes import ROUTES as OPENAI_ROUTES
from quire.server.api.responses.routes import ROUTES as RESPONSES_ROUTES
from quire.server.api.router_info import Load, ModelInfo, ServerInfo, get_load, model_info, server_info
from quire.server.api.tgi.dialect import TGI
from quire.server.api.tgi.routes import ROUTES as TGI_ROUTES
from quire.server.api.tgi.routes import VERTEX
from quire.server.api.tgi.strict import STRICT_OPENAI, STRICT_TGI
from quire.server.http import health
from quire.server.http.docs_html import docs_html
from quire.server.http.openapi import describe
from quire.server.http.route import Dialect, Handler, Route
from quire.server.http.web.chat_html import HTML_HEADERS, chat_html, wants_html
from quire.server.service.service import Service
from quire.server.settings import ServerSettings


async def root(service: Service, request: Request) -> Response:
    """The chat for browsers, readiness for other clients."""
    if wants_html(request.headers.get("accept", "")):
        return Response(chat_html(), headers=HTML_HEADERS)
    return await health.ready(service, request)


async def openapi(service: Service, request: Request) -> Response:
    return Response(msgspec.json.encode(openapi_document()), media_type="application/json")


async def docs(service: Service, request: Request) -> Response:
    return HTMLResponse(_docs())


def _also_for_anthropic(route: Route, handler: Handler, answer: Any) -> Route:
    """The route, with a different answer for clients that send the header of the Anthropic API."""

    @wraps(route.handler)
    async def by_version(service: Service, request: Request) -> Response:
        return await (handler if VERSION in request.headers else route.handler)(service, request)

    return route._replace(handler=by_version, answer=(*route.answer, answer))


_ANTHROPIC_MODELS = {
    "/v1/models": (anthropic_models.list_models, AnthropicModelList),
    "/v1/models/{model}": (anthropic_models.get_model, AnthropicModel),
}
_open = partial(Route, "GET", dialect=TGI, is_open=True)
HEALTH = _open("/health", health.ready)
GENERATES = _open("/health/generate", health.generates, answer=(health.Generates,))
SERVER_INFO = _open("/server_info", server_info, answer=(ServerInfo,))
MODEL_INFO = _open("/model_info", model_info, answer=(ModelInfo,))
ROUTES = (
    *(
        _also_for_anthropic(route, *_ANTHROPIC_MODELS[route.path]) if route.path in _ANTHROPIC_MODELS else route
        for route in OPENAI_ROUTES
    ),
    *RESPONSES_ROUTES,
    *ANTHROPIC_ROUTES,
    *TGI_ROUTES,
    HEALTH,
    HEALTH._replace(path="/ping"),
    _open("/health/live", health.live),
    GENERATES,
    GENERATES._replace(path="/health_generate", is_documented=False),
    SERVER_INFO,
    SERVER_INFO._replace(path="/get_server_info"),
    MODEL_INFO,
    MODEL_INFO._replace(path="/get_model_info"),
    _open("/get_load", get_load, answer=(list[Load],)),
    _open("/metrics", health.metrics, answer=(str,), media_type="text/plain"),
    _open("/docs", docs, answer=(str,), media_type="text/html"),
    _open("/api-doc/openapi.json", openapi, is_documented=False),
    _open("/", root, is_documented=False),
)

STRICT_DIALECTS: dict[Dialect, Dialect] = {OPENAI: STRICT_OPENAI, TGI: STRICT_TGI}


def routes_for(settings: ServerSettings) -> list[Route]:
    """The routes with the paths and the dialects that the settings choose."""
    routes = list(ROUTES)
    if settings.aip_predict_route is not None:
        routes.append(VERTEX._replace(path=settings.aip_predict_route))
    if settings.aip_health_route is not None:
        routes.append(HEALTH._replace(path=settings.aip_health_route))
    if not settings.tgi_strict:
        return routes
    return [route._replace(dialect=STRICT_DIALECTS.get(route.dialect, route.dialect)) for route in routes]


@cache
def openapi_document() -> dict[str, Any]:
    return describe(ROUTES)


@cache
def _docs() -> str:
    return docs_html(openapi_document())
