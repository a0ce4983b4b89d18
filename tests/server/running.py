"""A whole server in this process: real sockets, the fake executor."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import uvicorn

from quire.core.scheduler import Scheduler
from quire.engine.adapters import Read
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.grammar.matcher import Grammars
from quire.request import Request, SamplingParams
from quire.server.http.app import make_app
from quire.server.http.connection import Connection
from quire.server.service.served_model import ServedModel
from quire.server.service.service import Service
from quire.server.settings import ServerSettings
from tests.core.harness import limits
from tests.fake_executor import VOCABULARY, FakeExecutor, expected_tokens
from tests.patience import WAIT_S
from tests.server.fake_engine import read_adapter
from tests.server.vocabulary import served_model


def new_driver(
    before_result: Callable[..., None] | None = None,
    grammars: Grammars | None = None,
    adapters: Mapping[str, Path] | None = None,
    adapter_folder: Path | None = None,
    read: Read = read_adapter,
    **changes: object,
) -> Driver:
    wanted = {"num_pages": 3000, "max_batch_size": 16, "max_sequence_tokens": 512, "max_step_tokens": 600,
              "max_batch_prefill_tokens": 512}  # fmt: skip
    chosen = limits(**(wanted | changes))
    executor = FakeExecutor(
        chosen.num_pages,
        chosen.page_size,
        chosen.max_batch_size,
        None,
        before_result,
        guess_percent=80 if chosen.max_guesses else None,
    )
    engine = Engine(Scheduler(chosen, time.monotonic), executor, grammars=grammars, read_adapter=read)
    engine.adapters.root = adapter_folder
    for name, folder in (adapters or {}).items():
        engine.adapters.load(name, str(folder))
    return Driver(engine)


class RunningServer:
    """Serves until `stop`. The driver and the service are within reach of tests."""

    def __init__(
        self,
        *,
        settings: ServerSettings | None = None,
        model: ServedModel | None = None,
        before_result: Callable[..., None] | None = None,
        connection: type[Connection] = Connection,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        adapters: Mapping[str, Path] | None = None,
        adapter_folder: Path | None = None,
        read: Read = read_adapter,
        **limit_changes: object,
    ) -> None:
        self.model = model or served_model()
        grammars = Grammars(lambda: self.model.tokenizer, self.model.end_ids, VOCABULARY)
        self.driver = new_driver(before_result, grammars, adapters, adapter_folder, read, **limit_changes)
        self._settings = settings or ServerSettings()
        self._connection = connection
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(loop_factory,), daemon=True)

    def start(self) -> "RunningServer":
        self.driver.start()
        self._thread.start()
        assert self._started.wait(WAIT_S)
        return self

    def _serve(self, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.service = Service(self.model, self._settings)
        self.service.connect(self.driver.open(self.service.deliver))
        certificate = {"ssl_certfile": self._settings.ssl_certfile, "ssl_keyfile": self._settings.ssl_keyfile}
        config = uvicorn.Config(
            make_app(self.service), http=self._connection, port=0, log_level="warning", lifespan="off", **certificate
        )
        self._server = uvicorn.Server(config)
        task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        scheme = "http" if self._settings.ssl_certfile is None else "https"
        self.url = f"{scheme}://127.0.0.1:{port}"
        self._started.set()
        await task

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self.driver.stop()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < until, "it did not come true in time"
            time.sleep(0.005)

    def expected(self, prompt: list[int], max_tokens: int, number: int = 0, **fields: object) -> list[int]:
        """The tokens of greedy sampling, worked out by hand. `number` is that of the adapter."""
        asked = Request(0, tuple(prompt), max_tokens, SamplingParams(temperature=0), **fields)  # type: ignore[arg-type]
        return expected_tokens(asked, adapter=number)

    def expected_text(self, prompt: list[int], max_tokens: int, number: int = 0) -> str:
        return self.model.tokenizer.decode(self.expected(prompt, max_tokens, number))
