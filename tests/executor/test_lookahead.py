"""The order in which steps are launched and collected."""

from typing import Any

import jax
import pytest

from quire.core.plan import StepPlan, StepResult
from quire.engine.executor import Pending
from quire.executor.executor import JaxExecutor
from quire.executor.pending import Pending as JaxPending
from tests.executor.rig import Rig
from tests.executor.test_schedules import check
from tests.executor.workload import workload


def sampled_of(pending: JaxPending) -> list[Any]:
    return [launched.sampled for launched in pending.launched]


class RecordedStep:
    def __init__(self, inner: Pending, step: int, trace: list[tuple[str, int]]) -> None:
        self._inner = inner
        self._step = step
        self._trace = trace

    def result(self) -> StepResult:
        self._trace.append(("result", self._step))
        return self._inner.result()


class RecordingExecutor:
    """Notes when steps are submitted and asked for, and whether they were still being computed then."""

    platform, num_late, num_padding_tokens, num_unfinished = "cpu", 0, 0, 0

    def __init__(self, inner: JaxExecutor) -> None:
        self._inner = inner
        self.trace: list[tuple[str, int]] = []
        self.num_under_way = 0

    def submit(self, plan: StepPlan) -> Pending:
        self.trace.append(("submit", plan.step))
        pending = self._inner.submit(plan)
        self.num_under_way += not all(array.is_ready() for array in jax.tree.leaves(sampled_of(pending)))
        return RecordedStep(pending, plan.step, self.trace)

    def reset(self) -> None:
        self._inner.reset()

    def check_device(self) -> None:
        self._inner.check_device()


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_next_steps_are_launched_before_a_result_is_asked_for(llama: Rig, lookahead: int) -> None:
    executor = RecordingExecutor(llama.executor)
    requests = workload(llama, 8, seed=50, max_tokens=20)
    run = llama.run(requests, executor=executor, lookahead=lookahead)
    assert check(llama, requests, run) <= 1
    at = {event: place for place, event in enumerate(executor.trace)}
    last = max(step for _, step in executor.trace)
    for step in range(1, last + 1):
        ahead = min(step + lookahead, last)
        # So many steps are launched by then and no more, but for the last ones, which wait for a token.
        assert at["submit", ahead] < at["result", step] or ahead > last - lookahead
        if step + lookahead < last:
            assert at["result", step] < at["submit", step + lookahead + 1]


def test_a_launch_does_not_wait_for_the_device(llama: Rig) -> None:
    executor = RecordingExecutor(llama.executor)
    run = llama.run(workload(llama, 8, seed=51), executor=executor)
    steps = run.engine.scheduler.counters.steps
    # A machine that lets this thread wait may finish a step meanwhile; not one after the other.
    assert executor.num_under_way > steps // 4
