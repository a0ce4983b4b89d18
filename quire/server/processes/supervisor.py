"""Starts the processes of a server, and restarts those that end unexpectedly."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import EngineFailed, InvalidSetting, ModelError, QuireError
from quire.ipc.shared_counter import SharedCounter
from quire.ipc.supervisor_link import GaveUp, StartRefused, Stop
from quire.ipc.worker_counts import KnownCounts, WorkerCounts
from quire.seeds import Seeds
from quire.server.processes.child import Child, first_of
from quire.server.processes.engine_processes import START_AGAIN_S, STOP_S, EnginePlace, EngineProcesses
from quire.server.processes.restarts import Restarts
from quire.server.processes.watchdog import STARTING_FACTOR, Silence, watching
from quire.server.processes.worker import run_worker
from quire.server.rate_limits import RateLimits
from quire.server.settings import ServerSettings

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Errors that say why a model cannot be served; any other is the engine's own.
REASONS: dict[str, type[QuireError]] = {
    InvalidSetting.kind: InvalidSetting,
    **{error.kind: error for error in ModelError.__subclasses__()},
}


class Supervisor:
    """Engine processes and HTTP workers, one or more of each, restarted when they end. Owned by its event loop.

    Holds what outlives them: the listening sockets, so that no connection is refused while a worker is replaced, the
    counts of rate limits and of drawn seeds, the metrics of workers, and by its engines' places the journal of each
    engine.
    """

    def __init__(
        self,
        places: Sequence[EnginePlace],
        settings: ServerSettings,
        chat_template: str | None,
        listeners: list[list[socket.socket]],  # of each worker
        announce: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._chat_template = chat_template
        self._listeners = listeners
        self._announce = announce
        self._limits = RateLimits(settings.keys)
        self._seeds = Seeds() if settings.seed is None else Seeds(settings.seed, SharedCounter())
        self._counts = KnownCounts()
        self._engines = EngineProcesses(places, settings, self._refuse, self._give_up)
        self._workers: dict[int, Child] = {}  # by place
        self._num_workers_made = 0
        self._gave_up: dict[int, str] = {}  # by engine
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._refused: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Run until a signal comes. Raises the reason why nothing can be served."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        engines = asyncio.create_task(self._engines.keep())
        workers = asyncio.gather(*(self._keep_worker(place) for place in range(len(self._listeners))))
        stopping = asyncio.create_task(self._stopping.wait())
        at_once = asyncio.create_task(self._at_once.wait())
        everything: list[asyncio.Future[Any]] = [engines, workers, stopping, at_once]
        try:
            engines.add_done_callback(self._note_defect)
            workers.add_done_callback(self._note_defect)
            first: set[asyncio.Future[Any]] = {workers, stopping, self._refused}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._refused.done():
                raise self._refused.result()
            if not stopping.done():
                raise EngineFailed("no HTTP worker can be kept running")
            # The workers drain; the engines run as long as they do.
            then: set[asyncio.Future[Any]] = {workers, at_once}
            await asyncio.wait(then, return_when=asyncio.FIRST_COMPLETED)
            if at_once.done():
                log.warning("stopping now, after a second signal: open requests are cut off")
                raise SystemExit(1)
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            for worker in self._workers.values():
                worker.kill()
            for worker in list(self._workers.values()):
                await worker.end(STOP_S)
            await self._engines.end(at_once=self._at_once.is_set())

    def _note_defect(self, task: "asyncio.Future[Any]") -> None:
        """A defect of the supervisor ends the server: nothing would watch it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._refuse(StartRefused(EngineFailed.kind, f"the supervisor failed: {error!r}"))

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._at_once.set()
            return
        self._stopping.set()
        for listener in (one for those in self._listeners for one in those):
            listener.close()  # the workers close theirs: new connections are refused
        for worker in self._workers.values():
            worker.send(Stop())

    def _refuse(self, refusal: StartRefused) -> None:
        if not self._refused.done():
            self._refused.set_result(REASONS.get(refusal.kind, EngineFailed)(refusal.message))

    def _give_up(self, news: GaveUp) -> None:
        log.critical("%s", news.reason)
        self._gave_up[news.engine] = news.reason
        for worker in self._workers.values():
            worker.send(news)

    # The HTTP workers

    async def _keep_worker(self, place: int) -> None:
        restarts = Restarts(self._settings.max_engine_restarts)
        is_first = True
        while not self._stopping.is_set():
            try:
                worker = await self._start_worker(place, is_first)
            except OSError as error:
                if is_first:
                    raise
                log.error("an HTTP worker cannot be started: %s", error)
                await asyncio.sleep(START_AGAIN_S)
                continue
            if self._stopping.is_set():
                worker.send(Stop())
            try:
                await self._follow(worker, is_first)
            finally:
                if worker.ended.is_set():
                    del self._workers[place]
            if self._stopping.is_set():
                return
            if worker.refusal is not None and is_first:
                self._refuse(worker.refusal)
                return
            is_first = is_first and worker.ready_s is None
            delay_s = restarts.delay_s(worker.ready_s)
            if delay_s is None:
                log.critical("%s ends again and again; it is not started any more", worker.name)
                return
            log.error("%s ended (%s); restarting it in %g s", worker.name, worker.exit_status, delay_s)
            await asyncio.sleep(delay_s)

    async def _start_worker(self, place: int, is_first: bool) -> Child:
        self._num_workers_made += 1  # a number of its own, so that no two requests have one id
        number = self._num_workers_made
        worker = self._workers[place] = await Child(
            f"quire-http-{place + 1}",
            run_worker,
            lambda line: (
                self._engines.addresses, number, self._settings, self._chat_template, self._limits, self._seeds,
                self._listeners[place], line, os.getpid(), is_first
            ),
        ).connected()  # fmt: skip
        worker.on_counts = lambda message: self._relay(message, worker)
        worker.send(WorkerCounts(self._counts.by_worker))
        for engine, reason in self._gave_up.items():
            worker.send(GaveUp(reason, engine))
        return worker

    def _relay(self, message: WorkerCounts, sender: Child) -> None:
        self._counts.hear(message.counts)
        for worker in self._workers.values():
            if worker is not sender:
                worker.send(message)

    async def _follow(self, worker: Child, is_first: bool) -> None:
        """Watch a worker until it ends, or until the server stops and its time to drain has passed."""
        limit_s = self._settings.worker_restart_after_s
        starting = None if is_first else Silence(worker.name, STARTING_FACTOR * limit_s)
        async with watching(worker, Silence(worker.name, limit_s), starting):
            await first_of(worker.up, worker.ended, self._stopping)
            if worker.up.is_set():
                self._announce_once()
            await first_of(worker.ended, self._stopping)
        await worker.end(self._settings.drain_s + STOP_S)

    def _announce_once(self) -> None:
        """Announce the server when all workers are ready for the first time."""
        workers = [self._workers.get(place) for place in range(len(self._listeners))]
        if all(worker is not None and worker.up.is_set() for worker in workers):
            announce, self._announce = self._announce, lambda: None
            announce()
