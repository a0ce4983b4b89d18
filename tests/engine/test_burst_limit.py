"""Bursts are planned for as long as they end in time."""

from quire.core.plan import Chunk, Kind, StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.burst_limit import BurstLimit
from tests.core.harness import limits


class Steps:
    """A clock, and steps that take as long as they are told to."""

    def __init__(self, longest_s: float) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(limits(max_burst=4), lambda: self.now)
        self.pace = BurstLimit(self.scheduler, longest_s, lambda: self.now)

    def run(self, seconds: float, burst: int = 1, kind: Kind = Kind.DECODE) -> None:
        self.pace.launched()
        self.now += seconds
        self.pace.ended(StepPlan(1, (Chunk(1, 0, 0, 0, kind, 5, burst, (), True),), burst=burst))


def test_bursts_stop_when_they_would_take_too_long_and_begin_again() -> None:
    steps = Steps(longest_s=0.010)
    assert steps.scheduler.burst == 4, "until it is known better"
    for _ in range(20):
        steps.run(0.004)
    assert steps.scheduler.burst == 1
    for _ in range(20):
        steps.run(0.002)
    assert steps.scheduler.burst == 4
    for _ in range(20):
        steps.run(0.008, burst=4)
    assert steps.scheduler.burst == 4


def test_steps_with_prompts_say_nothing_of_decodes() -> None:
    steps = Steps(longest_s=0.010)
    steps.run(0.002)
    for _ in range(20):
        steps.run(1.0, kind=Kind.PREFILL)
    assert steps.scheduler.burst == 4


def test_a_step_that_stood_behind_another_took_the_time_since_that_ended() -> None:
    steps = Steps(longest_s=0.010)
    for _ in range(20):
        steps.pace.launched()
    steps.now += 0.002
    for _ in range(20):
        steps.pace.ended(StepPlan(1, (Chunk(1, 0, 0, 0, Kind.DECODE, 5, 1, (), True),)))
        steps.now += 0.002
    assert steps.scheduler.burst == 4


def test_nothing_is_under_way_after_a_failed_step() -> None:
    steps = Steps(longest_s=0.010)
    steps.pace.launched()
    steps.now += 100.0
    steps.pace.forget()
    steps.run(0.002)
    assert steps.scheduler.burst == 4
