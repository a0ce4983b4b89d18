"""Steps that fail on a real device state: it is rebuilt, and everyone else's answer is as it would have been."""

import gc
from typing import Literal

import jax
import pytest

from quire.core.plan import StepPlan
from quire.errors import RequestFailed
from quire.request import Request
from tests.executor.faulty_executor import DeviceLost, FaultyExecutor
from tests.executor.rig import Rig
from tests.executor.test_schedules import check
from tests.executor.workload import GREEDY, workload

POISON = 299


@pytest.mark.parametrize("where", ["submit", "result"])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_passing_fault_changes_no_answer(llama: Rig, where: Literal["submit", "result"], lookahead: int) -> None:
    requests = workload(llama, 16, seed=40)
    executor = FaultyExecutor(llama.executor, lambda plan: plan.step in (3, 9), where)
    run = llama.run(requests, executor=executor, lookahead=lookahead)
    assert executor.num_resets == 2
    assert run.engine.num_faults == 2
    assert run.engine.num_requests_blamed == 0
    assert check(llama, requests, run) <= 1


@pytest.mark.parametrize("where", ["submit", "result"])
def test_the_request_at_fault_fails_and_the_others_finish(llama: Rig, where: Literal["submit", "result"]) -> None:
    requests = [r for r in workload(llama, 14, seed=41) if POISON not in r.prompt]
    culprit = Request(99, (5, POISON, 6, 7), 12, GREEDY)
    poisoned: set[int] = set()

    def fails(plan: StepPlan) -> bool:
        poisoned.update(start.slot for start in plan.started if POISON in start.prompt)
        poisoned.difference_update(start.slot for start in plan.started if POISON not in start.prompt)
        return any(chunk.slot in poisoned and chunk.start + chunk.length >= 8 for chunk in plan.chunks)

    executor = FaultyExecutor(llama.executor, fails, where)
    run = llama.run([*requests[:5], culprit, *requests[5:]], executor=executor)
    assert list(run.failures) == [99]
    assert isinstance(run.failures[99], RequestFailed)
    assert 2 <= executor.num_resets < 12
    assert run.engine.num_requests_blamed == 1
    assert llama.near_ties(culprit, run.answers[99, 0].tokens) <= 1  # what it was told before it failed
    del run.failures[99]
    assert check(llama, requests, run) <= 1


def test_a_state_that_was_lost_cannot_be_used_before_it_is_reset(llama: Rig) -> None:
    """So that the tests above show a rebuilt state and not one that survived."""
    engine = llama.engine(executor=FaultyExecutor(llama.executor, lambda plan: True, "submit"))
    engine.add(workload(llama, 1)[0])
    plan = engine.scheduler.plan()
    assert plan is not None
    executor = FaultyExecutor(llama.executor, lambda plan: True, "submit")
    with pytest.raises(DeviceLost):
        executor.submit(plan)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        llama.executor.submit(plan)
    executor.reset()
    assert llama.executor.submit(plan).result().step == plan.step


def test_reset_gives_back_the_memory_of_the_old_state(llama: Rig) -> None:
    llama.executor.reset()
    gc.collect()  # arrays of other tests that nothing uses
    before = sum(array.nbytes for array in jax.live_arrays())
    for _ in range(3):
        llama.executor.reset()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before
