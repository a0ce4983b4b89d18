"""The ASGI application."""

import logging
from collections.abc import Awaitable, Callable, Collection

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import QuireError
from quire.server import health
from quire.server.access import Access
from quire.server.answers import ClientGone
from quire.server.openai import chat, completions, models
from quire.server.openai.errors import error_response as openai_error
from quire.server.openai.requests import ChatRequest, CompletionRequest
from quire.server.service import Service
from quire.server.tgi import generate, tokenize
from quire.server.tgi.errors import error_response as tgi_error
from quire.server.tgi.info import info

log = logging.getLogger(__name__)

Handler = Callable[[Service, Request], Awaitable[Response]]
ErrorResponse = Callable[[QuireError, Collection[str]], Response]


def make_app(service: Service) -> Starlette:
    """All routes over one service."""
    chat_fields = ChatRequest.__struct_fields__
    completion_fields = CompletionRequest.__struct_fields__

    def openai(path: str, handler: Handler, method: str = "POST", fields: Collection[str] = ()) -> Route:
        return Route(path, _endpoint(service, handler, openai_error, fields, bool(fields)), methods=[method])

    def tgi(path: str, handler: Handler, method: str = "POST", generates: bool = False) -> Route:
        return Route(path, _endpoint(service, handler, tgi_error, (), generates), methods=[method])

    routes = [
        openai("/v1/chat/completions", chat.chat_completions, fields=chat_fields),
        openai("/v1/completions", completions.completions, fields=completion_fields),
        openai("/v1/models", models.list_models, "GET"),
        openai("/v1/models/{model:path}", models.get_model, "GET"),
        tgi("/", generate.root, generates=True),
        tgi("/generate", generate.generate, generates=True),
        tgi("/generate_stream", generate.generate_stream, generates=True),
        tgi("/invocations", generate.invocations, generates=True),
        tgi("/tokenize", tokenize.tokenize),
        tgi("/chat_tokenize", tokenize.chat_tokenize),
        tgi("/detokenize", tokenize.detokenize),
        tgi("/info", info, "GET"),
        *[Route(path, _endpoint(service, health.ready, openai_error)) for path in ("/", "/health", "/ping")],
        Route("/health/generate", _endpoint(service, health.generates, openai_error)),
        Route("/health/live", _endpoint(service, health.live, openai_error)),
        Route("/metrics", _endpoint(service, health.metrics, openai_error)),
    ]
    settings = service.settings
    middleware = [Middleware(Access, keys=settings.api_keys)] if settings.api_keys else []
    if settings.allowed_origins:
        allowed = list(settings.allowed_origins)
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])
        )
    app = Starlette(routes=routes, middleware=middleware)
    app.state.service = service
    return app


def _endpoint(
    service: Service,
    handler: Handler,
    error_response: ErrorResponse,
    fields: Collection[str] = (),
    is_counted: bool = False,
) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers every error there is in the shape its clients know. Requests to generate are counted."""

    async def endpoint(request: Request) -> Response:
        if is_counted:
            service.metrics.num_requests += 1
        try:
            return await handler(service, request)
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        except QuireError as error:
            if is_counted:
                service.metrics.note_error(error)
            return error_response(error, fields)

    return endpoint
