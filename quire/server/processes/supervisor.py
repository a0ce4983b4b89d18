"""Starts the processes of a server, and restarts those that end before their time."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class EnginePlace(NamedTuple):
    """One of the server's engines: the processes that take this place one after the other."""

    number: int
    process_name: str
    title: str  # in messages
    build: EngineBuilder
    address: str
    journal: Journal  # by which the next process knows the steps of the last one


def engine_places(builds: Sequence[EngineBuilder], addresses: Sequence[str]) -> list[EnginePlace]:
    """One engine has no number in names and messages."""
    if len(builds) == 1:
        return [EnginePlace(0, "quire-engine", "the engine process", builds[0], addresses[0], Journal())]
    return [
        EnginePlace(number, f"quire-engine-{number}", f"the process of engine {number}", build, address, Journal())
        for number, (build, address) in enumerate(zip(builds, addresses, strict=True))
    ]


class Supervisor:
    """Engine processes and HTTP workers, one or more of each, restarted when they end. Owned by its event loop.

    Holds what outlives them: the listening sockets, so that no connection is refused while a worker is replaced, the
    counts of rate limits, and the journal of each engine.
    """

    def __init__(
        self,
        places: Sequence[EnginePlace],
        settings: ServerSettings,
        chat_template: str | None,
        listeners: list[list[socket.socket]],  # of each worker
        announce: Callable[[], None],
    ) -> None:
        self._places = places
        self._settings = settings
        self._chat_template = chat_template
        self._listeners = listeners
        self._announce = announce
        self._limits = RateLimits(settings.keys)
        self._engines: dict[int, Child] = {}  # by number
        self._one_was_up = asyncio.Event()  # one of the engines
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
        engines = asyncio.gather(*(self._keep_engine(place) for place in self._places))
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
        workers, engines = list(self._workers.values()), list(self._engines.values())
        for child in workers if not at_once else workers + engines:
            child.kill()
        for engine in engines:
            engine.tell(Stop())
        for child in workers + engines:
            await self._end(child, STOP_S)

    async def _end(self, child: Child, within_s: float) -> None:
        """Wait for a process that was told to stop; kill it when the time has passed."""
        try:
            await asyncio.wait_for(child.ended.wait(), within_s)
        except TimeoutError:
            log.error("%s did not end within %g s and is killed", child.name, within_s)
            child.kill()
            await child.ended.wait()

    # The engines

    async def _keep_engine(self, place: EnginePlace) -> None:
        if place.number:  # the first one leaves the model's files and compiled programs on disk for the others
            await self._one_was_up.wait()
        restarts, limit_s = Restarts(self._settings.max_engine_restarts), self._settings.restart_after_s
        is_stuck, is_silent = StuckEngine(limit_s), Silence("the engine", STARTING_FACTOR * limit_s)
        num_before = 0
        while True:
            try:
                engine = self._engines[place.number] = await self._start_engine(place, num_before)
            except OSError as error:
                if not num_before:
                    raise
                log.error("%s cannot be started: %s", place.title, error)
                await asyncio.sleep(START_AGAIN_S)
                continue
            # The first engine may take any time to start: no client waits that was served before.
            async with watching(engine, is_stuck, is_silent if num_before else None):
                await first_of(engine.up, engine.ended, engine.refused)
                if engine.up.is_set():
                    self._one_was_up.set()
                await first_of(engine.ended, engine.refused)
            refusal = engine.refusal
            if refusal is not None:
                engine.kill()
                await engine.ended.wait()
            reason = refusal.message if refusal is not None else f"{place.title} ended ({engine.exit_status})"
            if engine.exit_code == MEMBER_LOST:  # whose start says why it waits
                num_before += 1
                continue
            is_first = not num_before and engine.ready_s is None
            if is_first and (refusal is not None or not self._one_was_up.is_set()):
                self._refuse(refusal or Refused(EngineFailed.kind, f"{reason} before it was ready"))
                return
            heartbeat = engine.heartbeat
            was_searching = heartbeat is not None and heartbeat.is_searching and engine.exit_code != ABANDONED
            delay_s = restarts.delay_s(engine.ready_s, was_searching)
            if delay_s is None:
                self._give_up(
                    GaveUp(f"{reason}, {restarts.num_quick} times in a row; it is not started again", place.number)
                )
                return
            num_before += 1
            log.error("%s; restarting it in %g s", reason, delay_s)
            await asyncio.sleep(delay_s)

    async def _start_engine(self, place: EnginePlace, num_before: int) -> Child:
        return await Child(
            place.process_name,
            run_engine,
            lambda line: (
                place.process_name, place.address, place.build, line, place.journal, num_before, os.getpid()
            ),
        ).hold()  # fmt: skip

    def _refuse(self, refusal: Refused) -> None:
        if not self._refused.done():
            self._refused.set_result(REASONS.get(refusal.kind, EngineFailed)(refusal.message))

    def _give_up(self, news: GaveUp) -> None:
        log.critical("%s", news.reason)
        self._gave_up[news.engine] = news.reason
        for worker in self._workers.values():
            worker.tell(news)

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
        addresses = [engine.address for engine in self._places]
        worker = self._workers[place] = await Child(
            f"quire-http-{place + 1}",
            run_worker,
            lambda line: (
                addresses, number, self._settings, self._chat_template, self._limits, self._listeners[place],
                line, os.getpid(), is_first
            ),
        ).hold()  # fmt: skip
        for engine, reason in self._gave_up.items():
            worker.tell(GaveUp(reason, engine))
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
