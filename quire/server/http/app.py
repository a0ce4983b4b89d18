"""The ASGI application."""

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import NoSuchRoute, QuireError, WrongMethod
from quire.server.api.openai import chat, completions, models
from quire.server.api.openai.errors import error_response as openai_error
from quire.server.api.tgi import generate, kserve, tokenize
from quire.server.api.tgi.errors import error_response as tgi_error
from quire.server.api.tgi.info import info
from quire.server.api.tgi.vertex import vertex
from quire.server.http.access import Access
from quire.server.http.docs_page import docs
from quire.server.http.openapi import openapi
from quire.server.http.web.page import page, wants_page
from quire.server.observe import health
from quire.server.service.answers import ClientGone
from quire.server.service.arrival import Arrival
from quire.server.service.service import Service

log = logging.getLogger(__name__)

Handler = Callable[[Service, Request], Awaitable[Response]]
ErrorResponse = Callable[[QuireError], Response]


class Route(NamedTuple):
    handler: Handler
    error_response: ErrorResponse  # every error there is, in the shape that the route's clients know
    generates: bool = False  # and is counted


async def root(service: Service, request: Request) -> Response:
    """A page for browsers; for others, whether requests would be answered."""
    return page() if wants_page(request.headers.get("accept", "")) else await health.ready(service, request)


_COMPLETION = Route(completions.completions, openai_error, True)
_VERTEX = Route(vertex, tgi_error, generates=True)
_CHAT = Route(chat.chat_completions, openai_error, True)

ROUTES: dict[str, dict[str, Route]] = {
    "/v1/completions": {"POST": _COMPLETION},
    "/v1/chat/completions": {"POST": _CHAT},
    "/v1/models": {"GET": Route(models.list_models, openai_error)},
    "/": {"GET": Route(root, tgi_error), "POST": Route(generate.root, tgi_error, generates=True)},
    "/generate": {"POST": Route(generate.generate, tgi_error, generates=True)},
    "/generate_stream": {"POST": Route(generate.generate_stream, tgi_error, generates=True)},
    "/invocations": {"POST": Route(generate.invocations, tgi_error, generates=True)},
    "/tokenize": {"POST": Route(tokenize.tokenize, tgi_error)},
    "/chat_tokenize": {"POST": Route(tokenize.chat_tokenize, tgi_error)},
    "/detokenize": {"POST": Route(tokenize.detokenize, tgi_error)},
    "/info": {"GET": Route(info, tgi_error)},
    "/health": {"GET": Route(health.ready, tgi_error)},
    "/ping": {"GET": Route(health.ready, tgi_error)},
    "/health/live": {"GET": Route(health.live, tgi_error)},
    "/health/generate": {"GET": Route(health.generates, tgi_error)},
    "/metrics": {"GET": Route(health.metrics, tgi_error)},
    "/api-doc/openapi.json": {"GET": Route(openapi, tgi_error)},
    "/docs": {"GET": Route(docs, tgi_error)},
    "/vertex": {"POST": _VERTEX},
    "/v2": {"GET": Route(kserve.server_metadata, tgi_error)},
    "/v2/health/live": {"GET": Route(kserve.live, tgi_error)},
    "/v2/health/ready": {"GET": Route(kserve.ready, tgi_error)},
}
# With names in them.
PATTERNS: dict[str, dict[str, Route]] = {
    "/v1/models/{model}": {"GET": Route(models.get_model, openai_error)},
    "/v2/models/{model}/versions/{version}": {"GET": Route(kserve.model_metadata, tgi_error)},
    "/v2/models/{model}/versions/{version}/ready": {"GET": Route(kserve.model_ready, tgi_error)},
    "/v2/models/{model}/versions/{version}/infer": {"POST": Route(kserve.infer, tgi_error, generates=True)},
}
_COMPILED = [
    (
        re.compile(pattern.replace("{model}", "(?P<model>.+?)").replace("{version}", "(?P<version>[^/]+)"), re.DOTALL),
        methods,
    )
    for pattern, methods in PATTERNS.items()
]


class App:
    """Looks a path up and calls its handler.

    A framework's router and middlewares would lie on the way of every streamed token: each is another coroutine to
    pass through when a stream is woken and when it writes.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        settings = service.settings
        self._routes = dict(ROUTES)
        if settings.aip_predict_route is not None:
            self._routes[settings.aip_predict_route] = {"POST": _VERTEX}
        if settings.aip_health_route is not None:
            self._routes[settings.aip_health_route] = {"GET": Route(health.ready, tgi_error)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection; this server speaks HTTP")
        response = await self._answer(scope, Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, request: Request) -> Response:
        metrics = self._service.metrics
        opened_s = time.monotonic()
        route: Route | None = None
        try:
            route = _route(self._routes, scope)
            metrics.num_requests += route.generates
            return await route.handler(self._service, request)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        except QuireError as error:
            if route is None:
                return openai_error(error)
            if route.generates:
                metrics.note_error(error)
                if self._service.tracing is not None:
                    name = route.handler.__name__
                    self._service.tracing.note_refusal(Arrival(request.headers, name, opened_s), error)
            if self._service.settings.tgi_strict:
                return tgi_error(error)
            return route.error_response(error)
        except Exception:  # a defect of ours; the client is told without the details, which are in the log
            log.exception("%s %s failed", scope["method"], scope["path"])
            metrics.failed("incomplete")
            unknown = QuireError("internal error; see the server log")
            return route.error_response(unknown) if route is not None else openai_error(unknown)


def _route(routes: Mapping[str, Mapping[str, Route]], scope: Scope) -> Route:
    path, method = scope["path"], scope["method"]
    methods = routes.get(path)
    if methods is None:
        found = ((pattern.fullmatch(path), methods) for pattern, methods in _COMPILED)
        match, methods = next(((match, methods) for match, methods in found if match), (None, None))
        if match is None or methods is None:
            raise NoSuchRoute(f"there is no {path[:200]}")
        scope["path_params"] = match.groupdict()
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        raise WrongMethod(f"{path} takes {' and '.join(methods)}, not {method}")
    return route


class MetricsPort:
    """Keeps what comes to the port of the metrics to the metrics."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["server"][1] == self._port and scope["path"] != "/metrics":
            message = f"there is no {scope['path'][:200]} on port {self._port}, which has /metrics alone"
            await tgi_error(NoSuchRoute(message))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def make_app(service: Service) -> ASGIApp:
    """The application with what stands before it, as the settings say."""
    settings = service.settings
    app: ASGIApp = App(service)
    if settings.prometheus_port is not None:
        app = MetricsPort(app, settings.prometheus_port)
    if settings.api_keys:
        health_routes = () if settings.aip_health_route is None else (settings.aip_health_route,)
        app = Access(
            app,
            settings.api_keys,
            open_paths=health_routes,
            silent=settings.tgi_strict,
            keeps_apart=settings.isolate_api_keys,
        )
    if settings.allowed_origins:
        allowed = list(settings.allowed_origins)
        app = CORSMiddleware(app, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])
    return app
