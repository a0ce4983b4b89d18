"""Several engine processes: in which order they start, and what becomes of one that cannot."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from quire.ipc.address import new_address
from quire.ipc.supervisor_link import GaveUp, StartRefused
from quire.server.processes.engine_processes import EngineProcesses, engine_places
from quire.server.settings import ServerSettings
from tests.patience import WAIT_S
from tests.server.fake_engine import FakeEngine


class Kept:
    """Engines, and what is told of them."""

    def __init__(self, *builds: FakeEngine) -> None:
        self.refused: list[StartRefused] = []
        self.given_up: list[GaveUp] = []
        with new_address() as one, new_address() as other:
            places = engine_places(builds, [one, other])
        self.engines = EngineProcesses(places, ServerSettings(), self.refused.append, self.given_up.append)

    @property
    def started(self) -> list[int]:
        return sorted(self.engines._running)

    @property
    def ready(self) -> list[int]:
        return [number for number in self.started if self.engines._running[number].up.is_set()]


@asynccontextmanager
async def kept(*builds: FakeEngine) -> AsyncIterator[Kept]:
    one = Kept(*builds)
    keeping = asyncio.create_task(one.engines.keep())
    try:
        yield one
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await one.engines.end(at_once=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.01)


def test_the_others_start_when_the_first_is_ready_and_one_that_ends_before_it_is_ready_starts_again(tmp_path: Path):
    """The first leaves compiled programs for them. After it no end of another one ends the server."""
    first, second = tmp_path / "first", tmp_path / "second"

    async def run() -> None:
        async with kept(FakeEngine(tmp_path, builds_after=first), FakeEngine(tmp_path, builds_after=second)) as one:
            await until(lambda: one.started == [0])
            first.touch()
            await until(lambda: one.started == [0, 1])
            assert one.ready == [0]
            waiting = one.engines._running[1]
            os.kill(waiting._process.pid, signal.SIGKILL)
            await until(lambda: one.engines._running[1] is not waiting)
            second.touch()
            await until(lambda: one.ready == [0, 1])
            assert (one.refused, one.given_up) == ([], [])
            assert one.engines._running[1].name == "quire-engine-1"

    asyncio.run(run())


def test_an_engine_that_cannot_be_made_at_first_ends_the_server(tmp_path: Path):
    async def run() -> None:
        async with kept(FakeEngine(tmp_path), FakeEngine(tmp_path, refuses=True)) as one:
            await until(lambda: bool(one.refused))
            assert one.refused == [StartRefused("unsupported_model", "the model has three heads; two are supported")]

    asyncio.run(run())
