"""Requests live, no step is under way, and none is planned."""

import logging
import time

import pytest

from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import MAX_EMPTY_PLANS, Engine
from quire.ipc.messages import Failed
from quire.request import FinishReason
from tests.core.harness import limits, request
from tests.engine.test_driver import Client
from tests.fake_executor import FakeExecutor, expected_tokens
from tests.patience import WAIT_S

STUCK = 47  # a prompt that holds it stops the planning of all


class Stopping(Scheduler):
    """Plans nothing while a certain request is there."""

    num_asked = 0  # times without a plan

    def plan(self) -> StepPlan | None:
        if any(STUCK in one.request.prompt for id in self.request_ids() for one in self._requests.sequences(id)):
            self.num_asked += 1
            return None
        return super().plan()


def stopping_engine(lookahead: int = 1) -> Engine:
    chosen = limits(num_pages=200, max_batch_size=8)
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size)
    return Engine(Stopping(chosen, time.monotonic), executor, lookahead)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_requests_for_which_nothing_is_planned_fail_and_the_engine_goes_on(
    lookahead: int, caplog: pytest.LogCaptureFixture
):
    engine = stopping_engine(lookahead)
    driver = Driver(engine)
    client = Client(driver)
    driver.start()
    before = client.submit(1, max_tokens=4)
    client.wait_for(before)
    stuck = [client.submit(n, prompt=(1, STUCK), max_tokens=4) for n in (2, 3)]
    client.wait_for(*stuck)
    after = client.submit(4, max_tokens=6)
    client.wait_for(after)
    assert client.ended[after.request_id] is FinishReason.LENGTH
    assert client.tokens[after.request_id] == expected_tokens(after)
    for one in stuck:
        failed = client.ended[one.request_id]
        assert isinstance(failed, Failed)
        assert failed.kind == "generation"
        assert "no step is planned for this request, and none is under way: no limit holds it up" in failed.message
    assert driver.stop(join_s=WAIT_S)
    assert isinstance(engine.scheduler, Stopping)
    assert engine.scheduler.num_asked <= 2 * MAX_EMPTY_PLANS, "it does not spin"
    told = [one.getMessage() for one in caplog.records if one.levelno > logging.INFO]
    assert told
    assert "which are ended: 0 sequences run" in told[0]
    assert "blocked by nothing" in told[0]
    assert f"request {stuck[0].request_id}, sample 0 is waiting: 2 tokens of 6, 0 computed, 0 planned" in told[0]


def test_a_request_that_the_scheduler_has_lost_fails():
    engine = stopping_engine()
    engine.add(request(1))
    engine.scheduler.abort(1)  # and not by the engine, which waits for its end
    failures = [failure for _ in range(MAX_EMPTY_PLANS + 1) for failure in engine.step().failures]
    assert [failure.request_id for failure in failures] == [1]
    assert engine.is_idle


def test_empty_plans_of_an_idle_engine_end_nothing():
    engine = stopping_engine()
    for _ in range(2 * MAX_EMPTY_PLANS):
        assert not engine.launch()
    engine.add(request(1, max_tokens=3))
    while not engine.is_idle:
        assert not engine.step().failures


def test_one_empty_plan_ends_nothing():
    engine = stopping_engine()
    engine.add(request(1, prompt=(STUCK,)))
    engine.add(request(2, max_tokens=3))
    assert not engine.step().failures
    engine.abort(1)
    while not engine.is_idle:
        assert not engine.step().failures


def test_requests_that_may_run_since_another_has_left_are_not_ended():
    engine = stopping_engine()
    engine.add(request(1, prompt=(STUCK,)))
    engine.add(request(2, max_tokens=3))
    for _ in range(MAX_EMPTY_PLANS):
        assert not engine.step().failures
    engine.abort(1)
    while not engine.is_idle:
        assert not engine.step().failures


def test_a_request_that_comes_to_others_that_stand_still_is_planned_before_it_is_judged():
    engine = stopping_engine()
    engine.add(request(1))
    engine.scheduler.abort(1)  # as above
    for _ in range(MAX_EMPTY_PLANS):
        assert not engine.step().failures
    engine.add(request(2, max_tokens=3))
    ended = {failure.request_id for _ in range(4 * MAX_EMPTY_PLANS) for failure in engine.step().failures}
    assert ended == {1}
    assert engine.is_idle
