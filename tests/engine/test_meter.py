"""How long a step may take, by those before it."""

from types import SimpleNamespace

from quire.core.plan import StepPlan
from quire.engine.meter import STUCK_FACTOR, Meter


class Clocked:
    """An executor whose steps take as long as a test says."""

    def submit(self, plan: StepPlan) -> "Clocked":
        return self

    def result(self) -> None:
        return None


def step(num_tokens: int) -> SimpleNamespace:
    chunk = SimpleNamespace(tokens=(1,) * num_tokens)
    return SimpleNamespace(chunks=[chunk], num_tokens=num_tokens, started=())


def test_a_large_step_is_held_to_what_large_steps_took_and_not_to_many_small_ones():
    now = 0.0
    meter = Meter(Clocked(), None, lambda: now)
    assert meter.limit_s() is None
    for num_tokens, took_s in ((1, 0.3), (40, 0.4)):
        pending = meter.submit(step(num_tokens))
        now += took_s
        pending.result()
    meter.submit(step(40))
    assert meter.limit_s() == STUCK_FACTOR * meter.longest_s  # of one token, forty times, it would be thirty times that


def test_a_step_larger_than_any_before_has_as_much_more_time():
    now = 0.0
    meter = Meter(Clocked(), None, lambda: now)
    pending = meter.submit(step(10))
    now += 0.5
    pending.result()
    meter.submit(step(40))
    assert meter.limit_s() == STUCK_FACTOR * 0.5 * 4
