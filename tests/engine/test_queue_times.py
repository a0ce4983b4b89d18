"""Timings of requests in the engine."""

import re
from pathlib import Path

import pytest

from quire.core.limits import Limits
from quire.core.plan import Chunk, Kind, StepPlan
from quire.core.scheduler import Scheduler
from quire.core.stats import Blocker
from quire.engine.driver import Driver
from quire.engine.engine import Engine
from quire.engine.observer import Step
from quire.engine.queue_times import QueueTimes
from quire.ipc.messages import Abort, Account, AdapterTable, BegunWith, Failed, Progress, Queued, Started, Submit
from quire.request import Request, SamplingParams
from tests.core.harness import limits
from tests.fake_executor import FakeExecutor, plan_of


class Turns:
    """A driver whose turns are taken here, each a second after the other."""

    def __init__(self, **changes: object) -> None:
        self.now = 100.0
        chosen: Limits = limits(**changes)
        executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, None)
        engine = Engine(Scheduler(chosen, self.clock), executor, lookahead=0, clock=self.clock, read_adapter=hash)
        self.driver = Driver(engine)
        self.driver.start(own_thread=False)
        self.accounts: dict[int, Account] = {}
        self.queue_s: dict[int, float] = {}
        self.finished: list[int] = []
        self.port = self.driver.open(self.take)

    def clock(self) -> float:
        return self.now

    def take(self, events: list) -> None:
        for event in events:
            if isinstance(event, Account):
                assert event.request_id not in self.finished, "it comes with the last tokens at the latest"
                self.accounts[event.request_id] = event
            elif isinstance(event, Started):
                assert event.request_id not in self.queue_s, "it is told once"
                self.queue_s[event.request_id] = event.queue_s
            elif isinstance(event, Progress):
                assert all(update.request_id in self.queue_s for update in event.updates), "it comes before the tokens"
                self.finished += [update.request_id for update in event.updates if update.finish is not None]
            elif not isinstance(event, AdapterTable | BegunWith | Queued):
                assert isinstance(event, Failed)
                self.finished.append(event.request_id)

    def ask(self, count: int, prompt: list[int], max_tokens: int, **fields: object) -> int:
        request_id = self.port.request_id(count)
        sampling = SamplingParams(temperature=0)
        self.port.send(Submit(Request(request_id, tuple(prompt), max_tokens, sampling, **fields)))  # type: ignore
        return request_id

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.driver.turn()
            self.now += 1.0

    def finish(self, *request_ids: int) -> None:
        for _ in range(200):
            if set(request_ids) <= set(self.finished):
                return
            self.turn()
        raise AssertionError("it does not end")


def test_a_request_that_waits_for_a_slot_hears_so():
    turns = Turns(max_batch_size=1)
    first = turns.ask(1, [1, 2, 3], 5, timings=True)
    turns.turn()
    second = turns.ask(2, [4, 5, 6], 3, timings=True)
    turns.finish(first, second)
    assert turns.queue_s[first] == 0
    waited = turns.accounts[second]
    assert turns.queue_s[second] == 4  # four more steps of the first
    assert waited.blocked_s == {"slots": 4}
    assert (waited.prefill_chunks, waited.prefill_tokens, waited.preemptions) == (1, 3, 0)


def test_every_request_hears_how_long_it_waited_since_it_was_sent():
    turns = Turns(max_batch_size=1)
    first = turns.ask(1, [1, 2, 3], 5)
    turns.turn()
    second = turns.ask(2, [4, 5, 6], 3)
    turns.now += 0.5  # a step that is under way keeps the engine from reading its commands
    turns.finish(first, second)
    assert turns.queue_s == {first: 0, second: 4.5}


def test_a_prompt_that_is_cut_reports_its_chunks_and_the_next_one_waits_for_the_budget():
    turns = Turns(max_batch_prefill_tokens=3, max_step_tokens=16, page_size=4, num_pages=50)
    long = turns.ask(1, list(range(1, 11)), 2, timings=True)
    short = turns.ask(2, [11, 12], 2, timings=True)
    turns.finish(long, short)
    assert (turns.accounts[long].prefill_chunks, turns.accounts[long].prefill_tokens) == (4, 10)
    assert turns.accounts[short].blocked_s == {"budget": 3}


def test_the_waiting_rule_and_short_pages_are_told_apart():
    ruled = Turns(waiting_served_ratio=5.0, max_waiting_tokens=3)
    first = ruled.ask(1, [1, 2], 8)
    ruled.turn()
    second = ruled.ask(2, [3, 4], 2, timings=True)
    ruled.finish(first, second)
    assert list(ruled.accounts) == [second]  # the first did not ask
    assert list(ruled.accounts[second].blocked_s) == ["waiting_rule"]
    short = Turns(page_size=2, num_pages=7, max_sequence_tokens=12, prefix_caching=False)
    first = short.ask(1, [1, 2, 3, 4], 6)
    short.turn()
    second = short.ask(2, [5, 6, 7, 8, 9, 10], 2, timings=True)
    short.finish(first, second)
    assert list(short.accounts[second].blocked_s) == ["pages"]


def test_a_request_that_waits_for_an_adapter_slot_hears_so():
    turns = Turns(max_loras=1)
    for name in ("a", "b"):
        turns.driver.engine.adapters.load(name, f"/adapters/{name}")
    first = turns.ask(1, [1, 2, 3], 5, adapter="a", timings=True)
    turns.turn()
    second = turns.ask(2, [4, 5, 6], 3, adapter="b", timings=True)
    turns.finish(first, second)
    assert turns.accounts[second].blocked_s == {"adapters": 4}


@pytest.mark.parametrize("blocker", Blocker)
def test_whatever_keeps_the_queue_waiting_has_a_name_in_accounts(blocker: Blocker):
    times = QueueTimes()
    times.add(1, arrived_s=0.0, now=0.0, timings=True)
    prompt = plan_of(2, (Chunk(1, 0, 0, 0, Kind.PREFILL, 0, 3, (), samples=True),))
    for launched_s, plan in ((1.0, StepPlan(1, ())), (3.0, prompt)):
        times.step_launched(Step(plan, launched_s, launched_s, blocker))
    assert [account.blocked_s for account in times.accounts()] == [{blocker.client_name: 2.0}]


def test_the_documents_list_every_name_with_its_setting():
    api = Path(__file__).parents[2] / "docs" / "api.md"
    (row,) = re.findall(r"^\| `blocked_s` \|(.*?); `step` is", api.read_text(encoding="utf-8"), re.MULTILINE)
    listed = dict(re.findall(r"`(\w+)`(?: \((.*?)\))?", row))
    assert listed.keys() == {blocker.client_name for blocker in Blocker}
    for blocker in Blocker:
        if blocker.cause in Limits.__slots__:
            assert f"`--{blocker.cause.replace('_', '-')}`" in listed[blocker.client_name]


def test_a_preemption_is_counted_with_what_it_computes_again():
    turns = Turns(page_size=2, num_pages=9, max_sequence_tokens=12, prefix_caching=False)
    ids = [turns.ask(count, [10 * count, 1, 2], 8, timings=True) for count in (1, 2)]
    turns.finish(*ids)
    assert turns.driver.engine.scheduler.counters.preemptions > 0
    assert turns.accounts[ids[0]].preemptions == 0
    assert turns.accounts[ids[1]].preemptions == turns.driver.engine.scheduler.counters.preemptions
    assert turns.accounts[ids[1]].prefill_tokens > 3


def test_nothing_is_kept_of_requests_that_are_over():
    turns = Turns(max_batch_size=1)
    done = turns.ask(1, [1, 2, 3], 2, timings=True)
    waits = turns.ask(2, [1, 2, 3], 2, timings=True)
    refused = turns.ask(3, [1] * 500, 2, timings=True)
    turns.turn()
    turns.port.send(Abort(waits))
    turns.finish(done, refused)
    times = turns.driver._times
    assert not times._open
    assert not times._waiting
    assert not times._changed
    assert not times._started
