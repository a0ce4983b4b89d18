"""The processes of a server: one engine, and one or more that speak HTTP."""

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from quire.config import Config
from quire.engine.process import EngineBuilder, run_engine
from quire.errors import QuireError
from quire.server.front_end import FrontEnd, open_listener
from quire.server.logs import configure_logs
from quire.server.model_engine import ModelEngine
from quire.server.settings import ServerSettings

log = logging.getLogger(__name__)

STOP_S = 10.0  # for a process to end once it is told to

_spawn = multiprocessing.get_context("spawn")


def serve(config: Config, settings: ServerSettings, *, show_progress: bool = True) -> None:
    """Serve a model until a signal comes. Raises why it cannot be served."""
    configure_logs(settings.log_format, settings.logging_level)
    engine = ModelEngine(config, settings.log_format, show_progress, settings.logging_level)
    serve_engine(engine, settings, config.chat_template)


def serve_engine(
    build: EngineBuilder,
    settings: ServerSettings,
    chat_template: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve whatever engine `build` makes. This process is the first HTTP worker, and watches the others."""
    listener = open_listener(settings.host, settings.port, shared=settings.http_workers > 1)
    port = listener.getsockname()[1]
    listeners = [listener]
    if settings.prometheus_port is not None:
        listeners.append(open_listener(settings.host, settings.prometheus_port, shared=False))
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:  # of this user alone, and so is the socket in it
        path = Path(folder) / "engine.sock"
        engine = _spawn.Process(target=run_engine, args=(path, build), name="quire-engine")
        engine.start()
        workers: list[SpawnProcess] = []

        def start_workers(address: str) -> None:
            for number in range(1, settings.http_workers):
                worker = _spawn.Process(
                    target=_run_worker, args=(path, settings, chat_template, port), name=f"quire-http-{number}"
                )
                worker.start()
                workers.append(worker)
            (announce or _announce)(address)

        try:
            run_loop(FrontEnd(settings, chat_template).run_first(path, listeners, engine.is_alive, start_workers))
        finally:
            for process in (*workers, engine):  # the engine last: the workers drain
                _end(process, settings.drain_s + STOP_S)


def _run_worker(path: Path, settings: ServerSettings, chat_template: str | None, port: int) -> None:
    """Another HTTP worker, in a process of its own. Its parent tells it when to stop."""
    configure_logs(settings.log_format, settings.logging_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_loop(
            FrontEnd(settings, chat_template).run_another(path, lambda: open_listener(settings.host, port, shared=True))
        )
    except QuireError as error:
        log.critical("an HTTP worker cannot go on: %s", error.message)
        sys.exit(1)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, on the faster loop where there is one."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(main)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _end(process: SpawnProcess, within_s: float) -> None:
    if process.is_alive():
        process.terminate()
    process.join(within_s)
    if process.is_alive():
        log.error("%s did not end within %g s and is killed", process.name, within_s)
        process.kill()
        process.join(STOP_S)


def _announce(address: str) -> None:
    print(f"Quire serves at {address} (OpenAI API under /v1, process {os.getpid()})", file=sys.stderr, flush=True)
