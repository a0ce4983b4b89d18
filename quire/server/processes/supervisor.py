"""Starts the processes of a server, and restarts those that end before their time."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from quire.errors import EngineFailed, InvalidSetting, ModelError, QuireError
from quire.group.leader import MEMBER_LOST
from quire.ipc.journal import Journal
from quire.ipc.supervisor_link import GaveUp, Refused, Stop
from quire.server.processes.child import Child
from quire.server.processes.engine_process import ABANDONED, EngineBuilder, run_engine
from quire.server.processes.restarts import Restarts
from quire.server.processes.watchdog import STARTING_FACTOR, Silence, StuckEngine, watching
from quire.server.processes.worker import run_worker
from quire.server.rate_limits import RateLimits
from quire.server.settings import ServerSettings

log = logging.getLogger(__name__)

STOP_S = 10.0  # for a process to end after Stop
START_AGAIN_S = 1.0  # after the system refused to create a process
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Errors that say why a model cannot be served; any other is the engine's own.
REASONS: dict[str, type[QuireError]] = {
    InvalidSetting.kind: InvalidSetting,
    **{error.kind: error for error in ModelError.__subclasses__()},
}


async def first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Supervisor:
    """One engine process and one or more HTTP workers, each restarted when it ends. Owned by its event loop.

    Holds what outlives them: the listening sockets, so that no connection is refused while a worker is replaced, the
    counts of rate limits, and the engine's journal, by which the next engine knows the steps of the last one.
    """

    def __init__(
        self,
        build: EngineBuilder,
        settings: ServerSettings,
        chat_template: str | None,
        address: str,
        listeners: list[list[socket.socket]],  # of each worker
        announce: Callable[[], None],
    ) -> None:
        self._build = build
        self._settings = settings
        self._chat_template = chat_template
        self._address = address
        self._listeners = listeners
        self._announce = announce
        self._journal = Journal()
        self._limits = RateLimits(settings.keys)
        self._engine: Child | None = None
        self._workers: dict[int, Child] = {}  # by place
        self._num_workers_made = 0
        self._gave_up: str | None = None
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._refused: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Run until a signal comes. Raises the reason why nothing can be served."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        engine = asyncio.create_task(self._keep_engine())
        workers = asyncio.gather(*(self._keep_worker(place) for place in range(len(self._listeners))))
        stopping = asyncio.create_task(self._stopping.wait())
        at_once = asyncio.create_task(self._at_once.wait())
        everything: list[asyncio.Future[Any]] = [engine, workers, stopping, at_once]
        try:
            engine.add_done_callback(self._note_defect)
            workers.add_done_callback(self._note_defect)
            first: set[asyncio.Future[Any]] = {workers, stopping, self._refused}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._refused.done():
                raise self._refused.result()
            if not stopping.done():
                raise EngineFailed("no HTTP worker can be kept running")
            # The workers drain; the engine runs as long as they do.
            then: set[asyncio.Future[Any]] = {workers, at_once}
            await asyncio.wait(then, return_when=asyncio.FIRST_COMPLETED)
            if at_once.done():
                log.warning("told to stop a second time: open requests are cut off")
                raise SystemExit(1)
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
            await self._end_all(self._at_once.is_set())

    def _note_defect(self, task: "asyncio.Future[Any]") -> None:
        """A defect of the supervisor ends the server, which would be unwatched."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._refuse(Refused(EngineFailed.kind, f"the supervisor failed: {error!r}"))

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._at_once.set()
            return
        self._stopping.set()
        for listener in (one for those in self._listeners for one in those):
            listener.close()  # the workers close theirs: new connections are refused
        for worker in self._workers.values():
            worker.tell(Stop())

    async def _end_all(self, at_once: bool) -> None:
        engine = self._engine
        left = [*self._workers.values(), *([engine] if engine is not None else [])]
        for child in left:
            if at_once or child is not engine:
                child.kill()
            else:
                child.tell(Stop())
        for child in left:
            await self._end(child, STOP_S)

    async def _end(self, child: Child, within_s: float) -> None:
        """Wait for a process that was told to stop; kill it when the time has passed."""
        try:
            await asyncio.wait_for(child.ended.wait(), within_s)
        except TimeoutError:
            log.error("%s did not end within %g s and is killed", child.name, within_s)
            child.kill()
            await child.ended.wait()

    # The engine

    async def _keep_engine(self) -> None:
        restarts, limit_s = Restarts(self._settings.max_engine_restarts), self._settings.restart_after_s
        is_stuck, is_silent = StuckEngine(limit_s), Silence("the engine", STARTING_FACTOR * limit_s)
        num_before = 0
        while True:
            try:
                engine = self._engine = await self._start_engine(num_before)
            except OSError as error:
                if not num_before:
                    raise
                log.error("the engine process cannot be started: %s", error)
                await asyncio.sleep(START_AGAIN_S)
                continue
            # The first engine may take any time to start: no client waits that was served before.
            async with watching(engine, is_stuck, is_silent if num_before else None):
                await first_of(engine.ended, engine.refused)
            refusal = engine.refusal
            if refusal is not None:
                engine.kill()
                await engine.ended.wait()
            reason = refusal.message if refusal is not None else f"the engine process ended ({engine.exit_status})"
            if engine.exit_code == MEMBER_LOST:  # whose start says why it waits
                num_before += 1
                continue
            if not num_before and engine.ready_s is None:
                self._refuse(refusal or Refused(EngineFailed.kind, f"{reason} before it was ready"))
                return
            heartbeat = engine.heartbeat
            was_searching = heartbeat is not None and heartbeat.is_searching and engine.exit_code != ABANDONED
            delay_s = restarts.delay_s(engine.ready_s, was_searching)
            if delay_s is None:
                self._give_up(f"{reason}, {restarts.num_quick} times in a row; it is not started again")
                return
            num_before += 1
            log.error("%s; restarting it in %g s", reason, delay_s)
            await asyncio.sleep(delay_s)

    async def _start_engine(self, num_before: int) -> Child:
        return await Child(
            "quire-engine",
            run_engine,
            lambda line: (self._address, self._build, line, self._journal, num_before, os.getpid()),
        ).hold()

    def _refuse(self, refusal: Refused) -> None:
        if not self._refused.done():
            self._refused.set_result(REASONS.get(refusal.kind, EngineFailed)(refusal.message))

    def _give_up(self, reason: str) -> None:
        log.critical("%s", reason)
        self._gave_up = reason
        for worker in self._workers.values():
            worker.tell(GaveUp(reason))

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
                worker.tell(Stop())
            try:
                await self._follow(worker, is_first)
            finally:
                if worker.ended.is_set():
                    del self._workers[place]
            if self._stopping.is_set():
                return
            if worker.refusal is not None and is_first:
                self._refuse(worker.refusal)
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
                self._address, number, self._settings, self._chat_template, self._limits, self._listeners[place],
                line, os.getpid(), is_first
            ),
        ).hold()  # fmt: skip
        if self._gave_up is not None:
            worker.tell(GaveUp(self._gave_up))
        return worker

    async def _follow(self, worker: Child, is_first: bool) -> None:
        """Watch a worker until it ends, or until the server stops and its time to drain has passed."""
        limit_s = self._settings.worker_restart_after_s
        starting = None if is_first else Silence(worker.name, STARTING_FACTOR * limit_s)
        async with watching(worker, Silence(worker.name, limit_s), starting):
            await first_of(worker.up, worker.ended, self._stopping)
            if worker.up.is_set():
                self._announce_once()
            await first_of(worker.ended, self._stopping)
        await self._end(worker, self._settings.drain_s + STOP_S)

    def _announce_once(self) -> None:
        """Announce the server when all workers are ready for the first time."""
        workers = [self._workers.get(place) for place in range(len(self._listeners))]
        if all(worker is not None and worker.up.is_set() for worker in workers):
            announce, self._announce = self._announce, lambda: None
            announce()
