"""Several engine processes: in which order they start, and what becomes of one that cannot."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quire.ipc.address import new_address
from quire.ipc.supervisor_link import GaveUp, StartRefused
from quire.server.processes.engine_processes import EngineProcesses, engine_places
from quire.server.settings import ServerSettings
from tests.patience import WAIT_S
from tests.server.fake_engine import FakeEngine


class Kept:
    """Engines, and what is told of them."""

    keeping: "asyncio.Task[None]"

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
    one.keeping = asyncio.create_task(one.engines.keep())
    try:
        yield one
    finally:
        one.keeping.cancel()
        await asyncio.gather(one.keeping, return_exceptions=True)
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


class Unstarted(FakeEngine):
    """The system has no process for it, as long as the file `builds_after` is not there."""

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.builds_after is not None
        if not self.builds_after.exists():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return FakeEngine, (self.tokenizer,)


def test_where_there_is_no_process_for_another_engine_the_first_goes_on_and_it_starts_later(tmp_path: Path, caplog):
    async def run() -> None:
        async with kept(FakeEngine(tmp_path), Unstarted(tmp_path, builds_after=tmp_path / "free")) as one:
            await until(lambda: one.keeping.done() or "engine 1 cannot be started" in caplog.text)
            assert one.ready == [0]
            (tmp_path / "free").touch()
            await until(lambda: one.keeping.done() or one.ready == [0, 1])
            assert (one.refused, one.given_up) == ([], [])
            assert not one.keeping.done()

    asyncio.run(run())


def test_where_there_is_no_process_for_the_first_engine_the_server_ends(tmp_path: Path):
    async def run() -> None:
        async with kept(Unstarted(tmp_path, builds_after=tmp_path / "free"), FakeEngine(tmp_path)) as one:
            await until(one.keeping.done)
            assert isinstance(one.keeping.exception(), BlockingIOError)

    asyncio.run(run())


def test_an_engine_that_cannot_be_made_at_first_ends_the_server(tmp_path: Path):
    async def run() -> None:
        async with kept(FakeEngine(tmp_path), FakeEngine(tmp_path, refuses=True)) as one:
            await until(lambda: bool(one.refused))
            assert one.refused == [StartRefused("unsupported_model", "the model has three heads; two are supported")]

    asyncio.run(run())
