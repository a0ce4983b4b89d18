"""A request that ends engines, while messages, ends and starts come in any order: every request gets its end.

There are no processes and there is no time: real drivers whose turns are taken here, and lines that carry messages, or
lose those that were not sent when an engine ended.
"""

import asyncio
import random
from collections import deque
from typing import Any

import msgspec
import pytest

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.port import Port
from quire.engine.preparations import GATHER_S
from quire.ipc.journal import Journal
from quire.ipc.messages import PORT_SHIFT, Command, Event, PromptBlocks, Stats
from quire.request import Request
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.service import Service
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings
from tests.core.harness import limits
from tests.engine.test_taking_over import Death, Dies
from tests.fake_executor import FakeExecutor
from tests.server.test_engine_health import stats
from tests.server.test_faulty_requests_among_engines import MODEL, check, requests

MAX_TURNS = 20_000
MAX_TICKS = 8  # of GATHER_S, in which nothing else happens
PLAIN = stats()


class Line:
    """A worker's connection to an engine: commands one way, and events, reports or its end the other way."""

    def __init__(self, worker: "Worker", process: "Process") -> None:
        self.worker = worker
        self.process = process
        self.commands: deque[Command] = deque()
        self.news: deque[str | list[Event] | Stats] = deque()
        self._port: Port | None = None

    def request_id(self, count: int) -> int:
        return self.worker.number << PORT_SHIFT | count

    def send(self, command: Command | PromptBlocks) -> None:
        if not isinstance(command, PromptBlocks) and not self.process.is_dead:
            self.commands.append(command)

    def close(self) -> None: ...

    def open(self) -> None:
        """The engine hears of the worker, and says that it is ready."""
        self._port = self.process.driver.open(self.news.append, self.worker.number)
        self.news.append("ready")

    def carry(self) -> None:
        assert self._port is not None
        self._port.send(self.commands.popleft())

    def end(self, num_lost: int) -> None:
        """The last messages were not sent."""
        for _ in range(min(num_lost, len(self.news))):
            self.news.pop()
        self.commands.clear()
        self.news.append("end")


class Process:
    """An engine process."""

    def __init__(self, seat: "Seat") -> None:
        state: dict[str, Any] = {} if not seat.world.snapshots else {"snapshots": seat.world.snapshots}
        chosen = limits(max_batch_size=16, max_step_tokens=64, num_pages=400, **state)
        hooks: dict[str, Any] = {seat.world.hook: seat.world.dies, "num_snapshots": chosen.snapshots}
        executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, **hooks)
        clock = seat.world.clock
        self.engine = Engine(Scheduler(chosen, clock), executor, clock=clock)
        self.driver = Driver(self.engine, gather=self.engine.take_over(seat.journal), abandon=seat.abandon)
        self.driver.start(own_thread=False)
        self.is_dead = False

    @property
    def can_turn(self) -> bool:
        return not self.driver._must_wait()


class Seat:
    """The engine processes that have one number, one after the other."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.number = number
        self.journal = Journal()
        self.process: Process | None = None

    def abandon(self, reason: str, no_request_at_fault: bool) -> None:
        raise AssertionError(reason)

    def turn(self) -> None:
        assert self.process is not None
        try:
            self.process.driver.turn()
        except Death:
            self.process.is_dead = True
            for worker in self.world.workers:
                line = worker.lines.get(self.number)
                if line is not None and line.process is self.process:
                    # The others stay in the socket, and the worker reads them before it hears of the end.
                    line.end(self.world.chance.randrange(4))
            self.process = None


class Worker:
    """An HTTP worker: a service, and its lines."""

    def __init__(self, world: "World", number: int, num_engines: int, num_workers: int) -> None:
        self.world = world
        self.number = number
        self.service = Service(MODEL, ServerSettings(data_parallel=num_engines, http_workers=num_workers))
        self.lines: dict[int, Line] = {}  # by number of the engine

    def read(self, engine: int) -> None:
        """Handle the next message of an engine."""
        line = self.lines[engine]
        news = line.news.popleft()
        if news == "ready":
            self.service.connect(line, engine, cache_tokens=1000)
        elif news == "end":
            del self.lines[engine]
            if self.service.engines[engine].port is not None:
                self.service.engine_lost("the engine process has ended", engine)
        else:
            self.service.on_messages([news] if isinstance(news, Stats) else news, engine=engine)  # type: ignore[list-item,arg-type]


class World:
    """Engines and workers. What happens next is drawn from all that could."""

    def __init__(
        self, seed: int, dies: Dies, hook: str, num_workers: int, snapshots: int = 0, num_engines: int = 2
    ) -> None:
        """`snapshots`: of the state that slots have beside pages; 0 where they have none."""
        self.chance = random.Random(seed)
        self.dies = dies
        self.hook = hook
        self.snapshots = snapshots
        self.now = 100.0
        self.seats = [Seat(self, number) for number in range(num_engines)]
        self.workers = [Worker(self, 1 + number, num_engines, num_workers) for number in range(num_workers)]

    def clock(self) -> float:
        return self.now

    def possible(self) -> list[Any]:
        """Everything that could happen next, but that time passes."""
        found: list[Any] = []
        for seat in self.seats:
            process = seat.process
            if process is None:
                found.append(lambda seat=seat: setattr(seat, "process", Process(seat)))
                continue
            if process.can_turn:
                found += [seat.turn] * 3
            for worker in self.workers:
                if seat.number not in worker.lines:
                    found.append(lambda worker=worker, seat=seat: self._join(worker, seat))
        for worker in self.workers:
            for number, line in worker.lines.items():
                if line.commands:
                    found += [line.carry] * 3
                if line.news:
                    found += [lambda worker=worker, number=number: worker.read(number)] * 3
        return found

    def _join(self, worker: Worker, seat: Seat) -> None:
        assert seat.process is not None
        worker.lines[seat.number] = line = Line(worker, seat.process)
        line.open()

    def report(self) -> None:
        """Each engine sends its statistics, as it does four times a second."""
        for worker in self.workers:
            for line in worker.lines.values():
                if not line.process.is_dead:
                    is_searching = line.process.engine.is_searching
                    line.news.append(msgspec.structs.replace(PLAIN, is_searching=is_searching))

    def run(self, asked: list[Request]) -> list[Stream]:
        streams: list[Stream] = []
        coming = deque(asked)
        ticks = 0
        for _ in range(MAX_TURNS):
            if not coming and not any(worker.service.num_streams for worker in self.workers):
                return streams
            able = [worker for worker in self.workers if worker.service.engines.request_id is not None]
            possible = self.possible()
            if coming and able and (not possible or self.chance.random() < 0.3):
                worker = self.chance.choice(able)
                streams.append(worker.service.open([GenerationSpec(coming.popleft())]))
                continue
            if self.chance.random() < 0.05:
                self.report()
            if possible:
                ticks = 0
                self.chance.choice(possible)()
            else:
                ticks += 1
                assert ticks < MAX_TICKS, f"nothing happens any more: {self.described()}"
            if not possible or self.chance.random() < 0.02:
                self.now += GATHER_S if not possible else 0.1
            for stream in streams:
                if stream.is_over:
                    stream.close()
        raise AssertionError(f"it goes on for ever: {self.described()}")

    def described(self) -> str:
        placements = [worker.service.engines._placements for worker in self.workers]
        engines = [
            (seat.process.engine._isolation.focus, seat.process.engine._samples_left, seat.process.driver.is_gathering)
            for seat in self.seats
            if seat.process is not None
        ]
        return f"placements {placements}, engines {engines}"


def run(seed: int, num_workers: int, culprits: set[int], count: int, after: int, hook: str, snapshots: int = 0) -> None:
    async def act() -> None:
        world = World(seed, Dies(after=after), hook, num_workers, snapshots)
        asked = requests(count, culprits)
        check(world.run(asked), asked, culprits)

    asyncio.run(act())


@pytest.mark.parametrize("hook", ["before_submit", "before_result"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_its_end_in_whatever_order_things_happen(seed: int, num_workers: int, hook: str) -> None:
    run(seed, num_workers, {seed % 9}, 9, after=3 + seed % 4, hook=hook)


@pytest.mark.parametrize("seed", range(6))
def test_recurrent_layers_go_on_in_another_engine_with_snapshots_of_its_own(seed: int) -> None:
    run(seed, 1 + seed % 2, {seed % 9}, 9, after=3 + seed % 4, hook="before_submit", snapshots=4)
