"""Records of the steps of traced requests: some of them, to the front ends that asked, and none where nobody did."""

from itertools import pairwise

from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.port import Port
from quire.engine.step_traces import MIN_INTERVAL_S
from quire.ipc.messages import Abort, Event, Failed, Progress, StepTrace, Submit
from quire.request import Request
from tests.core.harness import GREEDY, limits, request
from tests.engine.test_engine import poisoned
from tests.fake_executor import NAN, POISON, FakeExecutor, Fault

STEP_S = 0.04


class Turns:
    """A driver whose turns are taken here. A step takes STEP_S on its clock."""

    def __init__(self, fault: Fault | None = None, lookahead: int = 0) -> None:
        self.now = 100.0
        chosen = limits(num_pages=200, max_batch_size=8)

        def before_result(plan: object, prompts: list[tuple[int, ...]]) -> None:
            self.now += STEP_S
            if fault is not None:
                fault(plan, prompts)

        executor = FakeExecutor(chosen.num_pages, 4, 8, before_result=before_result)
        self.engine = Engine(Scheduler(chosen, self.clock), executor, lookahead, clock=self.clock)
        self.driver = Driver(self.engine)
        self.driver.start(own_thread=False)

    def clock(self) -> float:
        return self.now

    def open(self) -> "Front":
        return Front(self.driver)

    def run(self) -> None:
        self.driver.turn()
        while not self.engine.is_idle:
            self.driver.turn()


class Front:
    def __init__(self, driver: Driver) -> None:
        self.events: list[Event] = []
        self.port: Port = driver.open(self.events.extend)

    def ask(self, count: int, **fields: object) -> Request:
        asked = request(self.port.request_id(count), sampling=GREEDY, **fields)
        self.port.send(Submit(asked))
        return asked

    @property
    def traces(self) -> list[StepTrace]:
        return [event for event in self.events if isinstance(event, StepTrace)]


def test_a_step_is_told_to_each_front_end_with_the_traced_requests_that_it_has_in_it():
    turns = Turns()
    first, second, third = turns.open(), turns.open(), turns.open()
    traced = [first.ask(1, traced=True), first.ask(2, traced=True, samples=2), second.ask(1, traced=True)]
    first.ask(3)
    third.ask(1)
    turns.driver.turn()
    (seen,) = first.traces
    assert seen.request_ids == [one.request_id for one in traced[:2]]
    assert [one.request_ids for one in second.traces] == [[traced[2].request_id]]
    assert not third.traces
    assert (seen.step, seen.method, seen.worked, seen.failed_ids) == (1, "prefill", True, [])
    assert (seen.num_sequences, seen.num_tokens) == (6, 16)
    assert (seen.begun_s, seen.collected_s, seen.completed_s) == (100.0, 100.0 + STEP_S, 100.0 + STEP_S)


def test_it_comes_before_the_tokens_of_the_step():
    turns = Turns()
    front = turns.open()
    front.ask(1, traced=True, max_tokens=1)
    turns.run()
    kinds = [type(event) for event in front.events]
    assert kinds.index(StepTrace) < kinds.index(Progress)


def test_steps_are_recorded_now_and_then_however_fast_they_come():
    turns = Turns(lookahead=1)
    front = turns.open()
    front.ask(1, traced=True, max_tokens=50)
    turns.run()
    times = [one.collected_s for one in front.traces]
    assert all(later - earlier >= MIN_INTERVAL_S for earlier, later in pairwise(times))
    assert len(times) == 1 + 49 // 3  # of steps of 0.04 s, every third


def test_nothing_is_recorded_for_requests_that_are_not_traced_or_have_left():
    turns = Turns()
    front = turns.open()
    front.ask(1, max_tokens=20)
    gone = front.ask(2, traced=True, max_tokens=20)
    turns.driver.turn()
    front.port.send(Abort(gone.request_id))
    front.events.clear()
    turns.now += 1.0
    turns.run()
    assert not front.traces
    assert not turns.driver._traces._traced


def test_a_step_that_fails_is_recorded_although_another_was_just_before():
    turns = Turns(poisoned(after=5), lookahead=1)
    front = turns.open()
    asked = front.ask(1, prompt=(1, 2, POISON), max_tokens=9, traced=True)
    turns.run()
    failed = [one for one in front.traces if not one.worked]
    assert failed
    assert all(one.request_ids == [asked.request_id] and not one.failed_ids for one in failed)
    assert isinstance(front.events[-1], Failed)
    assert front.traces[-1].failed_ids == [asked.request_id]  # of the step after which the request was told
    assert not turns.driver._traces._traced


def test_a_request_that_fails_alone_is_told_of_with_its_step():
    turns = Turns()
    front = turns.open()
    asked = front.ask(1, prompt=(1, NAN, 2), traced=True)
    turns.run()
    (seen,) = front.traces
    assert (seen.request_ids, seen.worked, seen.failed_ids) == ([asked.request_id], True, [asked.request_id])
