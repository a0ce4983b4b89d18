"""One HTTP worker: connects to the engine processes and serves until it is stopped."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from quire.engine.garbage_collection import freeze_gc
from quire.errors import InvalidSetting, QuireError, without_folders
from quire.ipc.supervisor_link import (
    ALIVE_INTERVAL_S,
    Alive,
    ControlMessage,
    GaveUp,
    StartRefused,
    Stop,
    SupervisorLink,
    Up,
    open_link,
)
from quire.ipc.worker_counts import KnownCounts, WorkerCounts
from quire.seeds import Seeds
from quire.server.http.loading import Loading
from quire.server.http.server import HttpServer
from quire.server.rate_limits import RateLimits
from quire.server.settings import ServerSettings

if TYPE_CHECKING:
    from quire.ipc.messages import Described, Ready
    from quire.server.processes.engine_line import EngineLine
    from quire.server.service.served_model import ServedModel
    from quire.server.service.service import Service
    from quire.text.chat import ChatTemplates
    from quire.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

COUNTS_INTERVAL_S = 1.0
KEEP_S = 1.0  # after draining, to keep what has come


class FrontEnd:
    """Connects to the engines and serves, as soon as one of them is ready.

    `number` is unique among front ends. `chat_template` replaces the model's own. `limits` and `seeds` are those of all
    front ends.
    """

    def __init__(
        self,
        settings: ServerSettings,
        number: int,
        chat_template: str | None = None,
        limits: RateLimits | None = None,
        seeds: Seeds | None = None,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._seeds = seeds
        self._number = number
        self._chat_template = chat_template
        self._service: Service | None = None
        self._lines: list[EngineLine] = []
        self._keeping: list[asyncio.Task[None]] = []  # the lines
        self._described: Described | None = None
        self._greeted = asyncio.Event()  # an engine has sent Described or Ready
        self._gave_up: dict[int, str] = {}  # by engine: why there is none any more
        self._in_vain = asyncio.Event()  # no engine will come
        self._loading = Loading()
        self._others = KnownCounts()

    async def run(
        self,
        addresses: Sequence[str],
        listeners: list[socket.socket],
        line: socket.socket,
        orphaned: Callable[[], None],
        *,
        is_first: bool = True,
    ) -> None:
        """Serve on `listeners` once an engine, at one of `addresses`, is ready, until stopped.

        The first worker of a place answers from the start that it is not ready. One that replaces another lets clients
        wait, unless no engine will come: they were served before. `line` leads to the supervisor; `orphaned` is called
        when it is gone.
        """
        server = HttpServer(self._settings)
        self._loading = server.loading
        link = await open_link(line, lambda message: self._on_control(message, server), orphaned)
        self._alive = asyncio.create_task(_send_alive(link))
        before = asyncio.create_task(server.serve(listeners) if is_first else self._serve_in_vain(server, listeners))
        joining = asyncio.create_task(self.join(addresses))
        await asyncio.wait({before, joining}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            log.info("stopped before the engine was ready")
            return await before
        error = joining.exception()
        if error is not None:
            server.stop()
            if isinstance(error, QuireError):
                link.send(StartRefused(error.kind, error.message))
                if not is_first:  # else the supervisor says it
                    log.error("%s", error.message)
                return await before
            await before
        service = joining.result()
        service.others = self._others
        service.publish_counts = lambda: link.send(WorkerCounts({self._number: service.metrics.counts()}))
        server.admit(service)
        freeze_gc()
        link.send(Up())
        if not is_first and not self._in_vain.is_set():
            before.cancel()
            before = asyncio.create_task(server.serve(listeners))
        await self._serve(service, before)
        return None

    def _on_control(self, message: ControlMessage, server: HttpServer) -> None:
        if isinstance(message, Stop):
            server.stop()
        elif isinstance(message, GaveUp):
            self.give_up(message)
        elif isinstance(message, WorkerCounts):
            self._others.hear(message.counts)

    def give_up(self, news: GaveUp) -> None:
        """Note that an engine will not be started again. The supervisor has logged the reason as it is."""
        reason = self._gave_up[news.engine] = without_folders(news.reason)
        if self._keeping:
            self._keeping[news.engine].cancel()
        if self._service is not None:
            self._service.disconnect(reason, news.engine)
        self._loading.reason = reason
        if len(self._gave_up) == self._settings.data_parallel:
            self._loading.is_in_vain = True
            self._in_vain.set()

    async def _serve_in_vain(self, server: HttpServer, listeners: list[socket.socket]) -> None:
        """Answer 503 from now on: every engine has been given up."""
        stopped, in_vain = (asyncio.create_task(one) for one in (server.wait_until_stopped(), self._in_vain.wait()))
        try:
            await asyncio.wait({stopped, in_vain}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            in_vain.cancel()
        if in_vain.done():
            await server.serve(listeners)

    async def _serve(self, service: "Service", serving: "asyncio.Task[None]") -> None:
        """Send this worker's counts to the others and expire requests, until the server ends."""
        while not serving.done():
            service.publish_counts()
            service.expire()
            for keeping in self._keeping:
                if keeping.done() and not keeping.cancelled():
                    keeping.result()  # a defect: this worker ends, and the supervisor starts another
            await asyncio.wait({serving}, timeout=COUNTS_INTERVAL_S)
        await self.close(service)
        serving.result()

    async def close(self, service: "Service") -> None:
        """Leave the engines, once the service has drained."""
        await service.response_store.close(self._settings.drain_s + KEEP_S)  # no connection waits for these
        for keeping in self._keeping:
            keeping.cancel()
        for line in self._lines:
            line.close()
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)

    async def join(self, addresses: Sequence[str]) -> "Service":
        """Connect to the engines. The service is there as soon as one of them is ready."""
        await asyncio.to_thread(_import_service)
        from quire.server.processes.engine_line import EngineLine
        from quire.server.service.service import Service

        self._lines = [EngineLine(engine, address, self._number, self) for engine, address in enumerate(addresses)]
        self._keeping = [asyncio.create_task(line.keep()) for line in self._lines]
        for engine in self._gave_up:
            self._keeping[engine].cancel()
        while (described := self._described) is None:
            await self._next_greeting()
        text = await self._read_text(described)
        while not (ready := [line.ready for line in self._lines if line.ready is not None]):
            await self._next_greeting()  # none was ready, or it ended while the tokenizer was read
        service = Service(self._model(text, described, ready[0]), self._settings, self._limits, self._seeds)
        await service.response_store.open()
        service.platform = ready[0].platform
        if self._settings.otlp_endpoint is not None:
            from quire.server.observe.tracing import tracing_to  # needs packages that most installations do not have

            service.tracing = tracing_to(self._settings.otlp_endpoint, self._settings.otlp_service_name)
        self._service = service
        for line in self._lines:
            self._admit(service, line)
        for engine, reason in self._gave_up.items():
            service.disconnect(reason, engine)
        return service

    async def _next_greeting(self) -> None:
        self._greeted.clear()
        await self._greeted.wait()

    def _admit(self, service: "Service", line: "EngineLine") -> None:
        """Send requests to an engine that is ready, those that other engines had first."""
        if line.client is None or line.ready is None:  # `on_ready` comes later
            return
        if line.ready.platform != service.platform:
            reason = f"it runs on a {line.ready.platform}, and others on a {service.platform}; it is not used"
            service.engines[line.engine].why_not = reason
            log.critical("engine %d: %s", line.engine, reason)
            return
        line.client.on_messages = partial(service.on_messages, engine=line.engine)
        if line.adapters is not None:
            service.adapters.on_table(line.adapters)
        num_going_on = service.connect(line.client, line.engine, line.ready.cache_tokens)
        if line.was_lost:
            log.info("%s is back; %d requests go on", self._name_of(line), num_going_on)
        elif len(self._lines) > 1:
            log.info("%s is ready", self._name_of(line))

    def _name_of(self, line: "EngineLine") -> str:
        return "the engine" if len(self._lines) == 1 else f"engine {line.engine}"

    def on_described(self, described: "Described") -> None:
        self._described = described
        self._greeted.set()

    def on_ready(self, line: "EngineLine") -> None:
        self._greeted.set()
        if self._service is not None:
            self._admit(self._service, line)

    def on_waiting(self, line: "EngineLine", reason: str) -> None:
        reason = without_folders(reason)
        self._loading.reason = reason
        if self._service is not None:
            self._service.engines[line.engine].why_not = reason

    def on_lost(self, line: "EngineLine", reason: str) -> None:
        service = self._service
        if service is None or service.engines[line.engine].port is None:
            return
        num_moved, num_waiting = service.engine_lost(f"{reason}, and is started again", line.engine)
        if len(self._lines) == 1:
            log.error("%s; %d requests wait for it", reason, num_waiting)
        else:
            log.error(
                "engine %d: %s; others go on with %d requests, %d wait", line.engine, reason, num_moved, num_waiting
            )

    async def _read_text(self, described: "Described") -> "tuple[Tokenizer, ChatTemplates]":
        """Read tokenizer and templates in a thread, while the engine loads the weights."""
        path = described.tokenizer
        if path is None:
            raise InvalidSetting(
                f"{described.name} has no tokenizer; it can be measured with `quire bench`, not served"
            )

        from quire.text.chat import load_chat_templates
        from quire.text.tokenizer import load_tokenizer

        def read() -> "tuple[Tokenizer, ChatTemplates]":
            tokenizer = load_tokenizer(path)
            if not self._settings.parses_special_in_messages:
                tokenizer.prepare_shield()
            return tokenizer, load_chat_templates(path, tokenizer.special_tokens, override=self._chat_template)

        return await asyncio.to_thread(read)

    def _model(self, text: "tuple[Tokenizer, ChatTemplates]", described: "Described", ready: "Ready") -> "ServedModel":
        from quire.files.generation_defaults import GenerationDefaults
        from quire.server.service.served_model import ServedModel

        limit = ready.max_total_tokens
        max_input = self._settings.max_input_tokens
        if max_input is not None and not 1 <= max_input <= limit:
            raise InvalidSetting(f"max_input_tokens is {max_input}; it must be between 1 and max_total_tokens, {limit}")
        model = ServedModel(
            name=self._settings.served_model_name or described.name,
            tokenizer=text[0],
            templates=text[1],
            end_ids=described.end_ids,
            defaults=GenerationDefaults(**described.generation),  # type: ignore[arg-type]
            max_total_tokens=limit,
            max_input_tokens=max_input or limit,
            created=int(time.time()),
            max_guesses=ready.max_guesses,
        )
        for name in described.adapters:
            if name in model.known_as:
                raise InvalidSetting(f"lora_adapters has {name!r}, which is a name of the model itself")
        return model


def _import_service() -> None:
    """Import everything that requests need. It takes half a second, in which the server answers that it starts."""
    import quire.server.http.app
    import quire.server.processes.engine_line
    import quire.text.chat
    import quire.text.tokenizer  # noqa: F401


async def _send_alive(link: SupervisorLink) -> None:
    """Runs as long as the event loop turns."""
    while True:
        link.send(Alive())
        await asyncio.sleep(ALIVE_INTERVAL_S)
