"""A request that ends engines, and several engines that it could end: it is found, and meets two of them at most."""

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.outcome import Outcome
from quire.errors import RequestFailed
from quire.ipc.journal import Journal
from quire.ipc.messages import PORT_SHIFT, Abort, AllResumed, Command, Event, Failed, Progress, Submit
from quire.request import Request
from quire.server.service.generation_spec import GenerationSpec
from quire.server.service.service import Service
from quire.server.service.stream import Stream
from quire.server.settings import ServerSettings
from tests.core.harness import limits
from tests.engine.test_taking_over import Death, Dies
from tests.fake_executor import POISON, FakeExecutor, expected_tokens
from tests.server.test_engine_health import stats
from tests.server.vocabulary import served_model

MODEL = served_model()
MAX_ROUNDS = 5000


class Seat:
    """The engines that have one number, one after the other, and the port to the present one."""

    def __init__(self, number: int, service: Service, dies: Dies) -> None:
        self.number = number
        self.engine: Engine | None = None
        self._service = service
        self._dies = dies
        self._journal = Journal()

    def request_id(self, count: int) -> int:
        return 1 << PORT_SHIFT | count

    def send(self, command: Command) -> None:
        assert self.engine is not None
        if isinstance(command, Submit):
            self.engine.add(command.request, command.so_far, command.waited_s)
        elif isinstance(command, Abort):
            self.engine.abort(command.request_id)
        else:
            assert isinstance(command, AllResumed)

    def close(self) -> None: ...

    def start(self) -> None:
        chosen = limits(max_batch_size=16, max_step_tokens=64, num_pages=400)
        executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, self._dies)
        self.engine = Engine(Scheduler(chosen, lambda: 0.0), executor)
        self.engine.take_over(self._journal)
        self._service.connect(self, self.number, cache_tokens=1000)
        self._tell(Outcome([], self.engine.resume_search()))

    def step(self) -> bool:
        """False if the engine has ended by it."""
        assert self.engine is not None
        try:
            outcome = self.engine.step()
        except Death:
            self.engine = None
            self._service.engine_lost("the engine process has ended", self.number)
            return False
        self._tell(outcome)
        self._service.on_messages([stats(is_searching=self.engine.is_searching)], engine=self.number)
        return True

    def _tell(self, outcome: Outcome) -> None:
        events: list[Event] = [Progress(outcome.updates)]
        events += [Failed.from_error(failure.request_id, failure.error) for failure in outcome.failures]
        self._service.on_messages(events, engine=self.number)


def run(num_engines: int, asked: list[Request], dies: Dies, seed: int) -> tuple[list[Stream], Counter[int]]:
    """All streams at their end, and how often each engine ended. Engines start again after some rounds."""

    async def act() -> tuple[list[Stream], Counter[int]]:
        chance = random.Random(seed)
        service = Service(MODEL, ServerSettings(data_parallel=num_engines))
        seats = [Seat(number, service, dies) for number in range(num_engines)]
        for seat in seats:
            seat.start()
        streams = [service.open([GenerationSpec(one)]) for one in asked]
        ends: Counter[int] = Counter()
        for _ in range(MAX_ROUNDS):
            if not service.num_streams:
                return streams, ends
            for seat in seats:
                if seat.engine is None:
                    if chance.random() < 0.2:
                        seat.start()
                elif not seat.step():
                    ends[seat.number] += 1
            for stream in streams:
                if stream.is_over:
                    stream.close()
        raise AssertionError("engines end for ever")

    return asyncio.run(act())


def check(streams: list[Stream], asked: list[Request], culprits: set[int]) -> None:
    for number, (stream, one) in enumerate(zip(streams, asked, strict=True)):
        if number in culprits:
            assert isinstance(stream.error, RequestFailed), f"{number} is not found"
        else:
            assert stream.error is None, f"{number} is blamed"
            for sample, generated in enumerate(stream.prompts[0].samples):
                assert generated.tokens == expected_tokens(one, sample)


def requests(count: int, culprits: set[int], max_tokens: int = 12) -> list[Request]:
    return [
        Request(0, (number + 1, POISON if number in culprits else 2), max_tokens, seed=number, samples=1 + number % 2)
        for number in range(count)
    ]


@pytest.mark.parametrize("num_engines", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("after", [0, 7])
def test_a_request_that_ends_engines_is_found_and_ends_two_of_them_at_most(num_engines, after):
    asked = requests(32, {13})
    streams, ends = run(num_engines, asked, Dies(after=after), seed=num_engines)
    check(streams, asked, {13})
    assert len(ends) <= 2
    assert min(ends.values()) <= 2 or len(ends) == 1
    assert sum(ends.values()) <= 10, "more ends than halving thirty-two takes, and one before"


@given(
    num_engines=st.integers(1, 4),
    culprits=st.sets(st.integers(0, 11), max_size=3),
    # One: two of them, both while the same innocent request runs alone, are what a guilty one looks like.
    at=st.sets(st.integers(1, 60), max_size=1),
    after=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_several_culprits_are_found_beside_an_end_of_another_cause(num_engines, culprits, at, after, seed):
    asked = requests(12, culprits)
    streams, _ = run(num_engines, asked, Dies(at, after), seed)
    check(streams, asked, culprits)
