"""The engine in a process of its own, behind a local socket."""

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from quire.engine.driver import Driver
from quire.engine.front_end import FrontEnd
from quire.engine.meter import Metered, read_stats
from quire.engine.wire import Broken, Described, Others, frame
from quire.errors import EngineFailed, QuireError

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25


class EngineBuilder(Protocol):
    """Makes the engine inside its process. Travels there as a pickle."""

    def __call__(self, describe: Callable[[Described], None]) -> Metered:
        """`describe` is to be called as soon as it is known what the model is."""


class EngineProcess:
    """Serves front ends on a Unix socket until told to stop, or until the process that started it is gone.

    The event loop owns the connections; the engine's thread only hands bytes to it.
    """

    def __init__(self, path: Path, build: EngineBuilder, drain_s: float = 0.0) -> None:
        self.loop = asyncio.get_running_loop()
        self.described: Described | None = None
        self.broken: Broken | None = None
        self.driver: Driver | None = None
        self.metered: Metered | None = None
        self._path = path
        self._build = build
        self._drain_s = drain_s
        self._front_ends: set[FrontEnd] = set()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit status."""
        self.loop.add_signal_handler(signal.SIGTERM, self.stop)
        self.loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal sends it to everyone; the parent acts
        parent = multiprocessing.parent_process()
        if parent is not None:
            self.loop.add_reader(parent.sentinel, self.stop)
        server = await self.loop.create_unix_server(lambda: FrontEnd(self), str(self._path))
        stopping = asyncio.create_task(self._stop.wait())
        building = asyncio.create_task(asyncio.to_thread(self._build, self._describe_from_thread))
        await asyncio.wait({building, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if building.done():
            self._start(building)
        while not stopping.done():  # a broken engine stays too, until somebody has heard why
            self._send_stats()
            await asyncio.wait({stopping}, timeout=STATS_INTERVAL_S)
        server.close()
        if self.driver is not None:
            await asyncio.to_thread(self.driver.stop, self._drain_s)
            await asyncio.sleep(0)  # what the driver said last is written
        return 0 if self.broken is None else 1

    def stop(self) -> None:
        """Let `run` come to its end."""
        self._stop.set()

    def join(self, front_end: FrontEnd) -> None:
        self._front_ends.add(front_end)
        front_end.greet()

    def leave(self, front_end: FrontEnd) -> None:
        self._front_ends.discard(front_end)

    def _start(self, building: "asyncio.Task[Metered]") -> None:
        try:
            self.metered = building.result()
        except QuireError as error:
            self.broken = Broken(error.kind, error.message)
        except Exception as error:  # the front ends must hear of it
            log.exception("the engine could not be made")
            self.broken = Broken(EngineFailed.kind, f"the engine could not be made: {error!r}")
        else:
            self.driver = Driver(self.metered.engine)
            self.driver.start()
        self._greet_all()

    def _describe_from_thread(self, described: Described) -> None:
        self.loop.call_soon_threadsafe(self._describe, described)

    def _describe(self, described: Described) -> None:
        self.described = described
        self._greet_all()

    def _greet_all(self) -> None:
        for front_end in list(self._front_ends):
            front_end.greet()

    def _send_stats(self) -> None:
        if self.metered is not None and self._front_ends:
            data = frame([read_stats(self.metered)])
            for front_end in list(self._front_ends):
                front_end.send(data)
                others = [one.counts for one in self._front_ends if one is not front_end and one.counts is not None]
                if others:
                    front_end.send(frame([Others(others)]))


def run_engine(path: Path, build: EngineBuilder, drain_s: float = 0.0) -> None:
    """The engine process, from its start to its end."""

    async def run() -> None:
        status = await EngineProcess(path, build, drain_s).run()
        logging.shutdown()
        # Not a return: a thread that still builds, or a step that never ends, must not keep the process.
        os._exit(status)

    asyncio.run(run())
