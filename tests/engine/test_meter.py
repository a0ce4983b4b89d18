"""The time that a step may take, by the steps before it."""

from quire.core.plan import Chunk, Kind
from quire.engine.meter import Meter
from quire.engine.observer import Observers, Step
from quire.ipc.watchdog_timeout import STUCK_FACTOR
from tests.fake_executor import plan_of


def run(meter: Meter, num_tokens: int, took_s: float, waited_for_compiler: bool = False) -> None:
    plan = plan_of(1, (Chunk(1, 0, 0, 0, Kind.PREFILL, 0, num_tokens, (), samples=True),))
    step = Step(plan, 0.0, 0.0, took_s=took_s, waited_for_compiler=waited_for_compiler)
    meter.step_launched(step)
    meter.step_ended(step)


def test_a_large_step_is_held_to_what_large_steps_took_and_not_to_many_small_ones():
    meter = Meter()
    assert meter.longest.limit_s(1) is None
    run(meter, 1, 0.3)
    run(meter, 40, 0.4)
    assert meter.longest.limit_s(40) == STUCK_FACTOR * 0.4  # of one token, forty times, it would be thirty times that


def test_a_step_larger_than_any_before_has_as_much_more_time():
    meter = Meter()
    run(meter, 10, 0.5)
    assert meter.longest.limit_s(40) == STUCK_FACTOR * 0.5 * 4


def test_a_step_that_waited_for_a_compiler_tells_nothing_of_others():
    meter = Meter()
    run(meter, 10, 60.0, waited_for_compiler=True)
    assert meter.longest.limit_s(10) is None


def test_a_meter_that_has_failed_does_not_tell_how_long_steps_may_take():
    class Full(Meter):
        def step_delivered(self, step: Step) -> None:
            raise MemoryError

    meter, observers = Full(), Observers()
    observers.attach(meter)
    run(meter, 10, 0.5)
    assert meter.longest.limit_s(10) is not None
    observers.step_delivered(Step(plan_of(1, ()), 0.0, 0.0))
    assert meter.longest.limit_s(10) is None
