"""How long a step may take, by those before it."""

from quire.core.plan import Chunk, Kind, StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.meter import Meter
from quire.ipc.watchdog_timeout import STUCK_FACTOR
from tests.core.harness import limits


class Clocked:
    """An executor whose steps take as long as a test says."""

    def submit(self, plan: StepPlan) -> "Clocked":
        return self

    def result(self) -> None:
        return None


def step(num_tokens: int) -> StepPlan:
    return StepPlan(1, (Chunk(1, 0, 0, 0, Kind.PREFILL, 0, num_tokens, (), samples=True),))


def test_a_large_step_is_held_to_what_large_steps_took_and_not_to_many_small_ones():
    now = 0.0
    meter = Meter(Clocked(), Scheduler(limits(), lambda: 0.0), lambda: now)
    assert meter.limit_s() is None
    for num_tokens, took_s in ((1, 0.3), (40, 0.4)):
        pending = meter.submit(step(num_tokens))
        now += took_s
        pending.result()
    meter.submit(step(40))
    assert meter.limit_s() == STUCK_FACTOR * meter.longest_s  # of one token, forty times, it would be thirty times that


def test_a_step_larger_than_any_before_has_as_much_more_time():
    now = 0.0
    meter = Meter(Clocked(), Scheduler(limits(), lambda: 0.0), lambda: now)
    pending = meter.submit(step(10))
    now += 0.5
    pending.result()
    meter.submit(step(40))
    assert meter.limit_s() == STUCK_FACTOR * 0.5 * 4


def test_a_step_that_waited_for_a_compiler_tells_nothing_of_others():
    now, num_late = 0.0, 0
    meter = Meter(Clocked(), Scheduler(limits(), lambda: 0.0), lambda: now, num_late=lambda: num_late)
    pending = meter.submit(step(10))
    now, num_late = 60.0, 1
    pending.result()
    meter.submit(step(10))
    assert meter.limit_s() is None
