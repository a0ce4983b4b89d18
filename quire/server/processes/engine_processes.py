"""Keeps engine processes running."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.errors import EngineFailed
from quire.ipc.journal import Journal
from quire.ipc.supervisor_link import GaveUp, StartRefused, Stop
from quire.server.processes.child import Child, first_of
from quire.server.processes.engine_builder import ABANDONED, EngineBuilder
from quire.server.processes.engine_main import run_engine
from quire.server.processes.restarts import Restarts
from quire.server.processes.watchdog import STARTING_FACTOR, Silence, StuckEngine, watching
from quire.server.settings import ServerSettings
from quire.settings.group import MEMBER_LOST

log = logging.getLogger(__name__)

STOP_S = 10.0  # for a process to end after Stop
START_AGAIN_S = 1.0  # after the system refused to create a process


class EnginePlace(NamedTuple):
    """One of the server's engines: a process, and those that replace it after it ends."""

    number: int
    process_name: str
    title: str  # in messages
    build: EngineBuilder
    address: str
    journal: Journal  # tells the next process about the steps of the last one


def engine_places(builds: Sequence[EngineBuilder], addresses: Sequence[str]) -> list[EnginePlace]:
    """The places of all engines. A single engine has no number in names and messages."""
    if len(builds) == 1:
        return [EnginePlace(0, "quire-engine", "the engine process", builds[0], addresses[0], Journal())]
    return [
        EnginePlace(number, f"quire-engine-{number}", f"the process of engine {number}", build, address, Journal())
        for number, (build, address) in enumerate(zip(builds, addresses, strict=True))
    ]


class EngineProcesses:
    """An engine process in each place, restarted when it ends. Owned by the event loop."""

    def __init__(
        self,
        places: Sequence[EnginePlace],
        settings: ServerSettings,
        on_refused: Callable[[StartRefused], None],  # nothing can be served
        on_given_up: Callable[[GaveUp], None],  # an engine ended too often, and is not started again
    ) -> None:
        self._places = places
        self._settings = settings
        self._on_refused = on_refused
        self._on_given_up = on_given_up
        self._running: dict[int, Child] = {}  # by number
        self._one_was_up = asyncio.Event()  # one of the engines

    @property
    def addresses(self) -> list[str]:
        return [place.address for place in self._places]

    async def keep(self) -> None:
        """Keep the engines running until cancelled, or until every engine is given up."""
        await asyncio.gather(*(self._keep(place) for place in self._places))

    async def end(self, *, at_once: bool = False) -> None:
        """End the processes, once `keep` is cancelled."""
        for engine in self._running.values():
            if at_once:
                engine.kill()
            engine.send(Stop())
        for engine in self._running.values():
            await engine.end(STOP_S)

    async def _keep(self, place: EnginePlace) -> None:
        if place.number:  # the first one leaves the model's files and compiled programs on disk for the others
            await self._one_was_up.wait()
        restarts, limit_s = Restarts(self._settings.max_engine_restarts), self._settings.restart_after_s
        is_stuck, is_silent = StuckEngine(limit_s), Silence("the engine", STARTING_FACTOR * limit_s)
        num_before = 0
        while True:
            try:
                engine = self._running[place.number] = await self._start(place, num_before)
            except OSError as error:
                if not num_before and not self._one_was_up.is_set():
                    raise
                log.error("%s cannot be started: %s", place.title, error)
                await asyncio.sleep(START_AGAIN_S)
                continue
            # The first engine may take any time to start: no client has been served yet.
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
            if engine.exit_code == MEMBER_LOST:  # the next start logs the reason for the wait
                num_before += 1
                continue
            is_first = not num_before and engine.ready_s is None
            if is_first and (refusal is not None or not self._one_was_up.is_set()):
                self._on_refused(refusal or StartRefused(EngineFailed.kind, f"{reason} before it was ready"))
                return
            heartbeat = engine.heartbeat
            was_searching = heartbeat is not None and heartbeat.is_searching and engine.exit_code != ABANDONED
            delay_s = restarts.delay_s(engine.ready_s, was_searching)
            if delay_s is None:
                self._on_given_up(
                    GaveUp(f"{reason}, {restarts.num_quick} times in a row; it is not started again", place.number)
                )
                return
            num_before += 1
            log.error("%s; restarting it in %g s", reason, delay_s)
            await asyncio.sleep(delay_s)

    async def _start(self, place: EnginePlace, num_before: int) -> Child:
        return await Child(
            place.process_name,
            run_engine,
            lambda line: (
                place.process_name, place.address, place.build, line, place.journal, num_before, os.getpid()
            ),
        ).connected()  # fmt: skip
