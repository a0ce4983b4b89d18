"""Bursts are planned while they end in time."""

from quire.core.plan import Chunk, Kind
from quire.core.scheduler import Scheduler
from quire.engine.limits.step_limits import StepLimits
from quire.engine.observer import Step
from tests.core.harness import limits
from tests.fake_executor import plan_of


class Steps:
    """Steps that take as long as a test says."""

    def __init__(self, max_burst_s: float) -> None:
        self.scheduler = Scheduler(limits(max_burst=4), lambda: 0.0)
        self.limit = StepLimits(self.scheduler, max_burst_s, max_step_s=0.0)

    def run(
        self,
        took_s: float,
        burst: int = 1,
        kind: Kind = Kind.DECODE,
        error: Exception | None = None,
        waited: bool = False,
    ) -> None:
        plan = plan_of(1, (Chunk(1, 0, 0, 0, kind, 5, burst, (), True),), burst=burst)
        self.limit.step_ended(Step(plan, 0.0, 0.0, took_s=took_s, error=error, waited_for_compiler=waited))


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


def test_a_burst_is_tried_after_a_pause_that_doubles_while_they_take_too_long() -> None:
    steps = Steps(max_burst_s=0.010)
    pauses = []
    for _ in range(3):
        assert steps.scheduler.budget.burst == 4
        steps.run(0.012, burst=4)
        count = 0
        while steps.scheduler.budget.burst == 1:
            steps.run(0.003)
            count += 1
        pauses.append(count)
    assert pauses == [128, 256, 512]
    steps.run(0.007, burst=4)
    assert steps.scheduler.budget.burst == 4
    steps.run(0.060, burst=4)  # disturbed once
    assert steps.scheduler.budget.burst == 4
    steps.run(0.060, burst=4)
    assert steps.scheduler.budget.burst == 1
    for _ in range(128):
        assert steps.scheduler.budget.burst == 1
        steps.run(0.003)
    assert steps.scheduler.budget.burst == 4, "after a short one pauses are short again"


def test_one_disturbed_burst_among_many_ends_none() -> None:
    """In a closed loop, where the host takes longer for a single step than the limit allows for a token. After the very
    first, of which nothing is known before, there is a pause."""
    steps = Steps(max_burst_s=0.010)
    num_bursts = num_disturbed = 0
    for number in range(2000):
        if steps.scheduler.budget.burst > 1 and number % 7 < 6:  # some steps are single for other reasons
            num_bursts += 1
            is_disturbed = number in (0, 500, 778)
            num_disturbed += is_disturbed
            steps.run(0.060 if is_disturbed else 0.005, burst=4)
            assert steps.scheduler.budget.burst == (4 if number else 1)
        else:
            steps.run(0.004)
    assert num_disturbed == 3
    assert num_bursts > 1500


def test_a_burst_that_waited_for_the_compiler_says_nothing() -> None:
    steps = Steps(max_burst_s=0.010)
    for _ in range(20):
        steps.run(5.0, burst=4, waited=True)
    assert steps.scheduler.budget.burst == 4
