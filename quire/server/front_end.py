"""One HTTP worker: joined to the engine process, it serves until it is told to stop."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.client import EngineClient, connect
from quire.engine.wire import Broken, Described, Ready, ToFrontEnd
from quire.errors import EngineFailed, InvalidSetting, ModelError, QuireError
from quire.files.generation_defaults import GenerationDefaults
from quire.server.app import make_app
from quire.server.connection import Connection
from quire.server.health import unhealthy
from quire.server.served_model import ServedModel
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.text.chat import ChatTemplates, load_chat_templates
from quire.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

COUNTS_INTERVAL_S = 1.0
BACKLOG = 4096  # connections that wait to be accepted
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Why a model cannot be served; anything else is the engine's own fault.
REASONS: dict[str, type[QuireError]] = {
    InvalidSetting.kind: InvalidSetting,
    **{error.kind: error for error in ModelError.__subclasses__()},
}


class FrontEnd:
    """Joins the engine and serves. `chat_template` takes the place of the model's own."""

    def __init__(self, settings: ServerSettings, chat_template: str | None = None) -> None:
        self._settings = settings
        self._chat_template = chat_template
        self._service: Service | None = None

    async def run_first(
        self,
        path: Path,
        listeners: list[socket.socket],
        is_engine_alive: Callable[[], bool],
        announce: Callable[[str], None],
    ) -> None:
        """Answer on `listeners` from the start, and serve once the engine at `path` is ready.

        Raises why it did not get ready.
        """
        server = HttpServer(self._settings)
        serving = asyncio.create_task(server.serve(listeners))
        joining = asyncio.create_task(self._join(path, is_engine_alive))
        await asyncio.wait({serving, joining}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            log.info("stopped before the engine was ready")
            return await serving
        if joining.exception() is not None:
            server.should_exit = True
            await serving
        service, client = joining.result()
        server.admit(service)
        host, port = listeners[0].getsockname()[:2]
        announce(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await self._serve(service, client, serving)
        return None

    async def run_another(self, path: Path, open_listener: Callable[[], socket.socket]) -> None:
        """Serve beside the first: only once it can, as connections come to whoever listens."""
        service, client = await self._join(path, path.exists)
        server = HttpServer(self._settings)
        server.admit(service)
        await self._serve(service, client, asyncio.create_task(server.serve([open_listener()])))

    async def _serve(self, service: Service, client: EngineClient, serving: "asyncio.Task[None]") -> None:
        """Until the server ends; meanwhile the other workers hear of what this one counts."""
        while not serving.done():
            if self._settings.http_workers > 1:
                client.tell(service.metrics.counts())
            await asyncio.wait({serving}, timeout=COUNTS_INTERVAL_S)
        client.close()
        serving.result()

    async def _join(self, path: Path, is_engine_alive: Callable[[], bool]) -> tuple[Service, EngineClient]:
        loop = asyncio.get_running_loop()
        self._described: asyncio.Future[Described] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        client = await connect(path, self._take, self._lost, is_engine_alive)
        if client is None:
            raise EngineFailed("the engine process ended before it was ready")
        described = await self._described
        text = await self._read_text(described)
        ready = await self._ready
        self._service = service = Service(self._model(text, described, ready), self._settings)
        service.platform = ready.platform
        service.connect(client)
        client.take = service.take
        return service, client

    def _take(self, messages: list[ToFrontEnd]) -> None:
        """What the engine says before there is a service."""
        for message in messages:
            if isinstance(message, Described) and not self._described.done():
                self._described.set_result(message)
            elif isinstance(message, Ready) and not self._ready.done():
                self._ready.set_result(message)
            elif isinstance(message, Broken):
                self._fail(REASONS.get(message.kind, EngineFailed)(message.message))

    def _lost(self, reason: str) -> None:
        if self._service is not None:
            log.critical("%s", reason)
            self._service.disconnect(reason)
        self._fail(EngineFailed(reason))

    def _fail(self, error: QuireError) -> None:
        for waiting in (self._described, self._ready):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # it may be that nobody waits for it any more

    async def _read_text(self, described: Described) -> tuple[Tokenizer, ChatTemplates]:
        """Beside the loop, while the engine loads the weights."""
        path = described.tokenizer
        if path is None:
            raise InvalidSetting(
                f"{described.name} has no tokenizer; it can be measured with `quire bench`, not served"
            )

        def read() -> tuple[Tokenizer, ChatTemplates]:
            tokenizer = load_tokenizer(path)
            return tokenizer, load_chat_templates(path, tokenizer.special_tokens, override=self._chat_template)

        return await asyncio.to_thread(read)

    def _model(self, text: tuple[Tokenizer, ChatTemplates], described: Described, ready: Ready) -> ServedModel:
        limit = ready.max_total_tokens
        max_input = self._settings.max_input_tokens
        if max_input is not None and not 1 <= max_input <= limit:
            raise InvalidSetting(f"max_input_tokens is {max_input}; it must be between 1 and max_total_tokens, {limit}")
        return ServedModel(
            name=self._settings.served_model_name or described.name,
            tokenizer=text[0],
            templates=text[1],
            end_ids=described.end_ids,
            defaults=GenerationDefaults(**described.generation),  # type: ignore[arg-type]
            max_total_tokens=limit,
            max_input_tokens=max_input or limit,
            created=int(time.time()),
        )


class HttpServer(uvicorn.Server):
    """Says that it is not ready until a service is admitted, and drains when it is told to stop."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(
            uvicorn.Config(
                answer_loading,
                http=Connection,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=int(settings.drain_s) + 2,
            )
        )
        self._drain_s = settings.drain_s
        self._service: Service | None = None
        self._draining: asyncio.Task[None] | None = None

    def admit(self, service: Service) -> None:
        """Connections from here on reach `service`; those before are closed after their answer."""
        self._service = service
        if not self.config.loaded:
            self.config.load()
        self.config.loaded_app = make_app(service)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In the loop, and not raised again afterwards: there is an engine to be ended in order."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        yield

    def _stop(self, number: int) -> None:
        if self._service is not None and self._draining is None:
            log.info("stopping; %d requests may take %g s to finish", self._service.num_streams, self._drain_s)
            self._draining = asyncio.create_task(self._service.drain(self._drain_s))
        self.handle_exit(number, None)


async def answer_loading(scope: Scope, receive: Receive, send: Send) -> None:
    """The application until there is a service."""
    if scope["path"] == "/health/live":
        response = Response()
    else:
        response = unhealthy("the engine is starting", {"retry-after": "5"})
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def open_listener(host: str, port: int, *, shared: bool) -> socket.socket:
    """A socket that listens; `shared` with those of other workers.

    Two sockets that are bound and do not listen yet may have the same port, so it listens at once.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidSetting(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener
