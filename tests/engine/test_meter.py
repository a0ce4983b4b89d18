"""The time that a step may take, by the steps before it."""

from quire.core.plan import Chunk, Kind
from quire.engine.meter import Meter
from quire.engine.observer import Step
from quire.ipc.watchdog_timeout import STUCK_FACTOR
from tests.fake_executor import plan_of


class Steps:
    """A meter, and steps that take as long as a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_late = 0
        self.meter = Meter(lambda: self.now, lambda: self.num_late)

    def launch(self, num_tokens: int) -> Step:
        plan = plan_of(1, (Chunk(1, 0, 0, 0, Kind.PREFILL, 0, num_tokens, (), samples=True),))
        step = Step(plan, self.now, self.now, num_late=self.num_late)
        self.meter.step_launched(step)
        return step

    def run(self, num_tokens: int, took_s: float, num_compiled: int = 0) -> None:
        step = self.launch(num_tokens)
        self.now += took_s
        self.num_late += num_compiled
        step.ended_s, step.took_s, step.waited_for_compiler = self.now, took_s, num_compiled > 0
        self.meter.step_ended(step)


def test_a_large_step_is_held_to_what_large_steps_took_and_not_to_many_small_ones():
    steps = Steps()
    assert steps.meter.limit_s is None
    steps.run(1, 0.3)
    steps.run(40, 0.4)
    steps.launch(40)
    assert steps.meter.limit_s == STUCK_FACTOR * 0.4  # of one token, forty times, it would be thirty times that


def test_a_step_larger_than_any_before_has_as_much_more_time():
    steps = Steps()
    steps.run(10, 0.5)
    steps.launch(40)
    assert steps.meter.limit_s == STUCK_FACTOR * 0.5 * 4


def test_a_step_that_waited_for_a_compiler_tells_nothing_of_others():
    steps = Steps()
    steps.run(10, 60.0, num_compiled=1)
    steps.launch(10)
    assert steps.meter.limit_s is None
    assert not steps.meter.is_compiling
    steps.num_late += 1
    assert steps.meter.is_compiling
