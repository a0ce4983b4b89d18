"""The ASGI application."""

import logging
import time

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import NoSuchRoute, QuireError, Unauthorized
from quire.server.api.anthropic.dialect import ANTHROPIC, is_anthropic
from quire.server.api.dialect import Dialect
from quire.server.api.openai.dialect import OPENAI
from quire.server.api.tgi.dialect import TGI
from quire.server.caller import REQUEST_ID, key_name, request_id, request_id_from
from quire.server.http.access import Access
from quire.server.http.origins import Origins
from quire.server.http.route import Route, RouteTable
from quire.server.http.routes import routes_for
from quire.server.service.answers import ClientGone, ClientGoneEarly
from quire.server.service.service import Service

log = logging.getLogger(__name__)


class App:
    """Finds the route of a request, checks access and calls the handler.

    A framework's router and middlewares would lie on the way of every streamed token: each is another coroutine to
    pass through when a stream is woken and when it writes.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        settings = service.settings
        self._table = RouteTable(routes_for(settings))
        self._access = Access(settings.keys, isolates=settings.isolate_api_keys) if settings.keys else None
        self._origins = Origins(settings)
        self._metrics_port = settings.prometheus_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection; this server speaks HTTP")
        request = Request(scope, receive)
        own_id = request_id_from(request.headers.get(REQUEST_ID))
        request_id.set(own_id)
        key_name.set("")
        response = await self._answer(scope, request)
        response.headers[REQUEST_ID] = own_id
        if self._access is not None and "route" in scope and scope["route"].generates:
            response.headers.update(self._service.limits.headers(key_name.get()))
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, request: Request) -> Response:
        opened_s = time.monotonic()
        try:
            route = self._route(scope)
        except QuireError as error:
            title = f"{scope['method']} without a route"
            self._service.refusals.note(title, error.status, error, path=scope["path"])
            return self._no_route(scope, error)
        try:
            if route.generates:
                self._service.metrics.note_arrival()
                self._service.limits.admit_request(key_name.get())
            return await route.handler(self._service, request)
        except ClientGone as gone:
            if route.generates and isinstance(gone, ClientGoneEarly):
                self._service.metrics.note_dropped()
            return Response(status_code=499)  # the client is gone
        except QuireError as error:
            response = route.dialect.error_response(error)
            response.headers.update(error.headers)
            if not route.generates:
                self._service.refusals.note(route.title, response.status_code, error)
                return response
            if self._service.metrics.note_error(error):  # otherwise its stream wrote the log line
                self._service.refusals.note(route.title, response.status_code, error)
            if self._service.tracing is not None:
                self._service.tracing.note_refusal(route.name, request.headers, opened_s, error, response.status_code)
            return response
        except Exception:  # a defect of ours: the details are in the log
            log.exception("%s %s failed", scope["method"], scope["path"], extra={"request_id": request_id.get()})
            defect = QuireError("internal error; see the server log")
            self._service.metrics.note_error(defect)
            return route.dialect.error_response(defect)

    def _route(self, scope: Scope) -> Route:
        self._origins.check(scope)
        route: Route | None = None
        try:
            route = self._table.find(scope)
            if self._is_metrics_port(scope) and route.path != "/metrics":
                path = scope["path"][:200]
                raise NoSuchRoute(f"there is no {path} on port {self._metrics_port}; it has /metrics only")
            return route
        finally:  # a path that does not exist needs a key as well
            if self._access is not None and not (route is not None and route.is_open):
                self._access.check(scope)

    def _no_route(self, scope: Scope, error: QuireError) -> Response:
        if isinstance(error, Unauthorized) and self._service.settings.tgi_strict:
            return Response(status_code=401, headers=error.headers)
        response = self._dialect(scope).error_response(error)
        response.headers.update(error.headers)
        return response

    def _dialect(self, scope: Scope) -> Dialect:
        """The dialect for errors about a request without a route, a key or the right origin."""
        if is_anthropic(scope["path"], scope["headers"]):
            return ANTHROPIC
        return TGI if self._is_metrics_port(scope) else OPENAI

    def _is_metrics_port(self, scope: Scope) -> bool:
        return self._metrics_port is not None and scope["server"][1] == self._metrics_port


class CrossOrigin(CORSMiddleware):
    """Answers CORS preflights of the origins that are allowed, with a request id like every answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin")
        if scope["method"] == "OPTIONS" and origin is not None and not self.is_allowed_origin(origin):
            await self.app(scope, receive, send)  # which refuses it
        else:
            await super().__call__(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.headers[REQUEST_ID] = request_id_from(request_headers.get(REQUEST_ID))
        return response


def make_app(service: Service) -> ASGIApp:
    app: ASGIApp = App(service)
    if service.settings.allowed_origins:
        origins = list(service.settings.allowed_origins)
        app = CrossOrigin(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
    return app
