"""The engine in a process of its own, behind a local socket."""

import asyncio
import logging
import os
import time
from collections.abc import Callable

from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.garbage_collection import freeze_gc
from quire.engine.meter import Meter, attach_meter, read_stats
from quire.engine.port import Port
from quire.errors import EngineFailed, QuireError
from quire.ipc.framing import frame
from quire.ipc.journal import Journal, Record
from quire.ipc.messages import Broken, Described, Event, PromptBlocks, Ready, Waiting
from quire.ipc.server import FrontEndConnection, Greeting
from quire.ipc.supervisor_link import (
    ALIVE_INTERVAL_S,
    Alive,
    ControlMessage,
    Heartbeat,
    StartRefused,
    Stop,
    SupervisorLink,
    Up,
)
from quire.server.processes.engine_builder import ABANDONED, EngineBuilder
from quire.settings.group import MEMBER_LOST

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
STOOD_STILL_S = 1.0  # between two turns of the loop: the whole process was suspended


class EngineProcess:
    """Serves front ends on a local socket until it is stopped, or until its parent process is gone.

    The event loop owns the connections; the engine's thread only hands bytes to it. With a `link` it sends heartbeats
    to its supervisor. If the engine cannot continue the process ends: another one continues its `journal`, and the
    front ends submit their requests there again.
    """

    def __init__(self, address: str, build: EngineBuilder, journal: Journal | None = None, num_before: int = 0) -> None:
        self.loop = asyncio.get_running_loop()
        self.greetings: list[Greeting] = []
        self.driver: Driver | None = None
        self.engine: Engine | None = None
        self._meter: Meter | None = None
        self.link: SupervisorLink | None = None
        self._address = address
        self._build = build
        self._waiting: Waiting | None = None  # why it cannot begin yet
        self._journal = journal
        self._num_before = num_before  # engines before this one
        self._waiting_since_s = 0.0  # with work and without a finished step
        self._looked_s = 0.0
        self._front_ends: set[FrontEndConnection] = set()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit status."""
        server = await self.loop.create_unix_server(lambda: FrontEndConnection(self), self._address)
        stopping = asyncio.create_task(self._stop.wait())
        building = asyncio.create_task(asyncio.to_thread(self._build, self._describe_from_thread))
        while not building.done() and not stopping.done():
            if self.link is not None:
                self.link.send(Alive())
            await asyncio.wait({building, stopping}, timeout=ALIVE_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        if building.done():
            self._start(building)
        while not stopping.done():  # also with a broken engine, so that front ends get the reason
            self._send_stats()
            await asyncio.wait({stopping}, timeout=STATS_INTERVAL_S)
        server.close()
        if self.driver is not None:
            await asyncio.to_thread(self.driver.stop)
            await asyncio.sleep(0)  # the driver's last events are written
        return 1 if any(isinstance(greeting, Broken) for greeting in self.greetings) else 0

    def stop(self) -> None:
        """Let `run` return."""
        self._stop.set()

    def on_control(self, message: ControlMessage) -> None:
        """Handle a message of the supervisor."""
        if isinstance(message, Stop):
            self.stop()

    def join(self, front_end: FrontEndConnection) -> None:
        self._front_ends.add(front_end)
        front_end.greet()
        if self._waiting is not None:
            front_end.send(frame([self._waiting]))

    def leave(self, front_end: FrontEndConnection) -> None:
        self._front_ends.discard(front_end)

    def relay(self, message: PromptBlocks, sender: FrontEndConnection) -> None:
        data = frame([message])
        for front_end in self._front_ends - {sender}:
            front_end.send(data)

    def open_port(self, deliver: Callable[[list[Event]], None], number: int) -> Port:
        assert self.driver is not None, "Ready is sent once there is a driver"
        return self.driver.open(deliver, number)

    def _start(self, building: "asyncio.Task[Engine]") -> None:
        self._waiting = None
        broken: Broken | None = None
        try:
            engine = building.result()
        except QuireError as error:
            broken = Broken(error.kind, error.message)
        except Exception as error:  # reported to the front ends
            log.exception("the engine could not be built")
            broken = Broken(EngineFailed.kind, f"the engine could not be built: {error!r}")
        else:
            self._start_driver(engine)
            limits = engine.scheduler.limits
            cache_tokens = limits.capacity_tokens if limits.prefix_caching else 0
            platform = engine.executor.platform
            self._greet_all(Ready(limits.max_sequence_tokens, platform, cache_tokens, limits.max_guesses))
        if broken is not None:
            self._greet_all(broken)
        if self.link is not None:
            self.link.send(Up() if broken is None else StartRefused(broken.kind, broken.message))

    def _start_driver(self, engine: Engine) -> None:
        self.engine, self._meter = engine, attach_meter(engine)
        gather = [] if self._journal is None else engine.take_over(self._journal)
        self.driver = Driver(engine, gather=gather, abandon=None if self._journal is None else self._abandon)
        freeze_gc()
        if engine.group is not None:
            engine.group.on_lost, engine.group.on_fault = self._on_member_lost, self._on_member_fault
        self.driver.start()
        engine.page_sources.start(self.driver)

    def _abandon(self, reason: str, no_request_at_fault: bool) -> None:
        """Called on the engine's thread. No request fails: the front ends resubmit them to the next engine."""
        assert self._journal is not None
        log.critical("the engine process ends: %s", reason)
        if no_request_at_fault:
            self._journal.write(Record())
        logging.shutdown()
        os._exit(ABANDONED)

    def _on_member_lost(self, reason: str) -> None:
        """Called on a thread of the group. Running requests are not at fault; earlier suspects stay suspects."""
        log.critical("%s; the engine process ends, and the group begins again", reason)
        if self._journal is not None:
            self._journal.write(Record(search=self._journal.read().search), is_last=True)
        logging.shutdown()
        os._exit(MEMBER_LOST)

    def _on_member_fault(self, reason: str) -> None:
        """Called on a thread of the group: a step failed on a member, by its own fault or because another was lost."""
        if self.engine is not None and self.engine.group is not None:
            self.engine.group.check()
        self._abandon(reason, False)

    def _describe_from_thread(self, described: Described | Waiting) -> None:
        if isinstance(described, Waiting):
            self.loop.call_soon_threadsafe(self._wait, described)
        else:
            self.loop.call_soon_threadsafe(self._greet_all, described)

    def _wait(self, waiting: Waiting) -> None:
        """Tell why it cannot begin yet: to a front end that joins later, what holds then."""
        if self.driver is None:
            self._waiting = waiting
            data = frame([waiting])
            for front_end in list(self._front_ends):
                front_end.send(data)

    def _greet_all(self, news: Greeting) -> None:
        self.greetings.append(news)
        for front_end in list(self._front_ends):
            front_end.greet()

    def _waited_s(self, engine: Engine) -> float:
        """Time with work and without a finished step, also if no step is launched."""
        now = time.monotonic()
        is_gathering = self.driver is not None and self.driver.is_gathering
        has_work = engine.checking_s is not None or not (engine.is_idle or is_gathering)
        if now - self._looked_s > STOOD_STILL_S:  # so did the steps
            has_work = False
        self._looked_s = now
        self._waiting_since_s = max(self._waiting_since_s, engine.last_end_s) if has_work else now
        return now - self._waiting_since_s

    def _send_stats(self) -> None:
        engine, meter = self.engine, self._meter
        if engine is None or meter is None:
            return
        waited_s = self._waited_s(engine)
        if self.link is not None:
            is_checking = engine.checking_s is not None
            step = meter.longest, engine.num_step_tokens, engine.is_compiling
            self.link.send(Heartbeat(waited_s, *step, is_searching=engine.is_searching, is_checking=is_checking))
        if self._front_ends:
            stats = read_stats(engine, meter, waited_s)
            stats.counters["restarts"] = self._num_before
            data = frame([stats])
            for front_end in list(self._front_ends):
                front_end.send(data)
