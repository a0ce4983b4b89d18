"""One HTTP worker: connects to the engine process and serves until it is stopped."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from quire.engine.garbage_collection import freeze_gc
from quire.errors import EngineFailed, InvalidSetting, QuireError
from quire.files.generation_defaults import GenerationDefaults
from quire.ipc.client import EngineClient, connect
from quire.ipc.messages import Described, Ready, ToFrontEnd, Waiting
from quire.ipc.supervisor_link import (
    ALIVE_INTERVAL_S,
    Alive,
    ControlMessage,
    GaveUp,
    Refused,
    Stop,
    SupervisorLink,
    Up,
    open_link,
)
from quire.server.http.server import HttpServer
from quire.server.rate_limits import RateLimits
from quire.server.service.served_model import ServedModel
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from quire.text.chat import ChatTemplates, load_chat_templates
from quire.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

COUNTS_INTERVAL_S = 1.0
KEEP_S = 1.0  # after draining, to keep what has come


class FrontEnd:
    """Connects to the engine and serves; connects to the next engine when that one ends.

    `number` is unique among front ends. `chat_template` replaces the model's own. `limits` are those of all front ends.
    """

    def __init__(
        self,
        settings: ServerSettings,
        number: int,
        chat_template: str | None = None,
        limits: RateLimits | None = None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._number = number
        self._chat_template = chat_template
        self._service: Service | None = None
        self._client: EngineClient | None = None
        self._rejoining: asyncio.Task[None] | None = None

    async def run(
        self,
        address: str,
        listeners: list[socket.socket],
        line: socket.socket,
        orphaned: Callable[[], None],
        *,
        is_first: bool = True,
    ) -> None:
        """Serve on `listeners` once the engine at `address` is ready, until stopped.

        The first worker of a place answers from the start that it is not ready. One that replaces another lets clients
        wait: they were served before. `line` leads to the supervisor; `orphaned` is called when it is gone.
        """
        self._address = address
        server = HttpServer(self._settings)
        self._loading = server.loading
        link = await open_link(line, lambda message: self._on_control(message, server), orphaned)
        self._alive = asyncio.create_task(_send_alive(link))
        joining = asyncio.create_task(self._join())
        before = asyncio.create_task(server.serve(listeners) if is_first else server.wait_until_stopped())
        await asyncio.wait({before, joining}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            log.info("stopped before the engine was ready")
            return await before
        error = joining.exception()
        if error is not None:
            if isinstance(error, QuireError):
                link.tell(Refused(error.kind, error.message))
            server.stop()
            await before
        service = joining.result()
        server.admit(service)
        freeze_gc()
        link.tell(Up())
        await self._serve(service, before if is_first else asyncio.create_task(server.serve(listeners)))
        return None

    def _on_control(self, message: ControlMessage, server: HttpServer) -> None:
        if isinstance(message, Stop):
            server.stop()
        elif isinstance(message, GaveUp):
            if self._rejoining is not None:
                self._rejoining.cancel()
            if self._service is not None:
                self._service.disconnect(message.reason)
            server.loading.reason = message.reason

    async def _serve(self, service: Service, serving: "asyncio.Task[None]") -> None:
        """Until the server ends, send this worker's counts to the others and expire requests."""
        while not serving.done():
            if self._settings.http_workers > 1 and self._client is not None:
                self._client.tell(service.metrics.counts())
            service.expire()
            await asyncio.wait({serving}, timeout=COUNTS_INTERVAL_S)
        await service.response_store.close(self._settings.drain_s + KEEP_S)  # no connection waits for these
        if self._rejoining is not None:
            self._rejoining.cancel()
        if self._client is not None:
            self._client.close()
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)
        serving.result()

    async def _join(self) -> Service:
        text: tuple[Tokenizer, ChatTemplates] | None = None
        while True:
            try:
                described = await self._connect()
                text = text or await self._read_text(described)
                ready = await self._ready
            except EngineFailed:
                continue  # the engine ended, and the supervisor starts another
            if self._client is not None:
                break  # else it was ready and ended while the tokenizer was read
        self._service = service = Service(self._model(text, described, ready), self._settings, self._limits)
        await service.response_store.open()
        service.platform = ready.platform
        if self._settings.otlp_endpoint is not None:
            from quire.server.observe.tracing import tracing_to  # needs packages that most installations do without

            service.tracing = tracing_to(self._settings.otlp_endpoint, self._settings.otlp_service_name)
        self._admit(service, self._client)
        return service

    async def _connect(self) -> Described:
        loop = asyncio.get_running_loop()
        self._described: asyncio.Future[Described] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._client = await connect(self._address, self._number, self._on_greetings, self._on_lost)
        return await self._described

    def _admit(self, service: Service, client: EngineClient) -> None:
        """Send requests to the engine, those that another engine had first."""
        client.take = service.on_messages
        service.connect(client)

    async def _rejoin(self, service: Service) -> None:
        """Cancelled when the engine is lost again."""
        await self._connect()
        await self._ready
        assert self._client is not None
        log.info("the engine is back; %d requests go on", service.num_streams)
        self._admit(service, self._client)

    def _on_greetings(self, messages: list[ToFrontEnd]) -> None:
        """Messages of an engine that is not ready yet."""
        for message in messages:
            if isinstance(message, Described) and not self._described.done():
                self._described.set_result(message)
            elif isinstance(message, Ready) and not self._ready.done():
                self._ready.set_result(message)
            elif isinstance(message, Waiting):
                self._loading.reason = message.reason
                if self._service is not None:
                    self._service.lose(message.reason)

    def _on_lost(self, reason: str) -> None:
        """The supervisor starts another engine, or sends GaveUp."""
        self._client = None
        if self._rejoining is not None:
            self._rejoining.cancel()
        if self._service is None:
            for waiting in (self._described, self._ready):
                if not waiting.done():
                    waiting.set_exception(EngineFailed(reason))
                    waiting.exception()  # marks it as seen: nothing may wait for it yet
            return
        log.error("%s; %d requests wait for it", reason, self._service.num_streams)
        self._service.lose(f"{reason}, and is started again")
        self._rejoining = asyncio.create_task(self._rejoin(self._service))

    async def _read_text(self, described: Described) -> tuple[Tokenizer, ChatTemplates]:
        """In a thread, while the engine loads the weights."""
        path = described.tokenizer
        if path is None:
            raise InvalidSetting(
                f"{described.name} has no tokenizer; it can be measured with `quire bench`, not served"
            )

        def read() -> tuple[Tokenizer, ChatTemplates]:
            tokenizer = load_tokenizer(path)
            if not self._settings.parses_special_in_messages:
                tokenizer.prepare_shield()
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


async def _send_alive(link: SupervisorLink) -> None:
    """Runs as long as the event loop turns."""
    while True:
        link.tell(Alive())
        await asyncio.sleep(ALIVE_INTERVAL_S)
