"""Bursts are planned while they end in time."""

from quire.core.plan import Chunk, Kind, StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.observer import Step
from quire.engine.step_time import BurstLimit
from tests.core.harness import limits


class Steps:
    """Steps that take as long as a test says."""

    def __init__(self, max_burst_s: float) -> None:
        self.scheduler = Scheduler(limits(max_burst=4), lambda: 0.0)
        self.limit = BurstLimit(self.scheduler, max_burst_s)

    def run(self, took_s: float, burst: int = 1, kind: Kind = Kind.DECODE, error: Exception | None = None) -> None:
        plan = StepPlan(1, (Chunk(1, 0, 0, 0, kind, 5, burst, (), True),), burst=burst)
        self.limit.step_ended(Step(plan, 0.0, 0.0, took_s=took_s, error=error))


def test_bursts_stop_when_they_would_take_too_long_and_begin_again() -> None:
    steps = Steps(max_burst_s=0.010)
    assert steps.scheduler.budget.burst == 4, "until it is known better"
    for _ in range(20):
        steps.run(0.004)
    assert steps.scheduler.budget.burst == 1
    for _ in range(20):
        steps.run(0.002)
    assert steps.scheduler.budget.burst == 4
    for _ in range(20):
        steps.run(0.008, burst=4)
    assert steps.scheduler.budget.burst == 4


def test_steps_with_prompts_and_steps_that_fail_say_nothing_of_decodes() -> None:
    steps = Steps(max_burst_s=0.010)
    steps.run(0.002)
    for _ in range(20):
        steps.run(1.0, kind=Kind.PREFILL)
        steps.run(1.0, error=RuntimeError("a device fault"))
    assert steps.scheduler.budget.burst == 4


def test_steps_with_guesses_say_nothing_of_bursts() -> None:
    steps = Steps(max_burst_s=0.010)
    steps.run(0.004, burst=4)
    for _ in range(20):
        steps.run(0.005, kind=Kind.VERIFY)
    assert steps.scheduler.budget.burst == 4


def test_bursts_go_on_where_a_single_step_takes_the_host_longer_than_a_token_of_theirs() -> None:
    steps = Steps(max_burst_s=0.010)
    for _ in range(20):
        steps.run(0.005, burst=4)
    for _ in range(20):
        steps.run(0.004)  # others wait meanwhile: four of these would take too long
    assert steps.scheduler.budget.burst == 4


def test_bursts_that_took_too_long_begin_again_when_steps_have_become_as_much_shorter() -> None:
    steps = Steps(max_burst_s=0.010)
    for _ in range(20):
        steps.run(0.020, burst=4)
    assert steps.scheduler.budget.burst == 1
    for _ in range(20):
        steps.run(0.008)
    assert steps.scheduler.budget.burst == 1, "a burst takes 20 ms beside steps of 8"
    for _ in range(20):
        steps.run(0.005)
    assert steps.scheduler.budget.burst == 1
    for _ in range(40):
        steps.run(0.0035)
    assert steps.scheduler.budget.burst == 4
