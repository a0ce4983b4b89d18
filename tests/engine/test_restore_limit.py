"""Pages that come from the host do not slow the steps of others by more than a twentieth."""

import random

from quire.core.plan import Chunk, Kind, PageCopy, Place, StepPlan, Tier
from quire.core.scheduler import Scheduler
from quire.engine.observer import Step
from quire.engine.restore_limit import RestoreLimit
from tests.core.harness import limits


class Steps:
    def __init__(self) -> None:
        self.scheduler = Scheduler(limits(host_pages=100, max_page_restores=40), lambda: 0.0)
        self.limit = RestoreLimit(self.scheduler)

    @property
    def allowed(self) -> int:
        return self.scheduler.budget.restores(has_decodes=True)

    def run(self, took_s: float, num_restored: int = 0, kind: Kind = Kind.DECODE, **changes: object) -> None:
        """As many pages go to the host as come from it."""
        device, host = Place(Tier.DEVICE, 1), Place(Tier.HOST, 1)
        copies = (PageCopy(device, host), PageCopy(host, device)) * num_restored
        plan = StepPlan(1, (Chunk(1, 0, 0, 0, kind, 5, 1, (), True),), copies)
        self.limit.step_ended(Step(plan, 0.0, 0.0, took_s=took_s, **changes))  # type: ignore[arg-type]


def test_as_many_pages_are_copied_as_add_a_twentieth() -> None:
    steps, chance = Steps(), random.Random(0)
    for _ in range(60):
        steps.run(0.100 * chance.uniform(0.97, 1.03))
        steps.run((0.100 + 0.0005 * steps.allowed) * chance.uniform(0.97, 1.03), steps.allowed)
    assert 6 <= steps.allowed <= 16  # 10 without the noise


def test_one_page_is_copied_however_long_it_takes() -> None:
    steps = Steps()
    for _ in range(5):
        steps.run(0.010)
        steps.run(0.100, 2)
    assert steps.allowed == 1


def test_copies_that_take_no_time_are_held_to_the_limit_of_a_step() -> None:
    steps = Steps()
    steps.run(0.010)
    steps.run(0.010, 2)
    assert steps.allowed == 40


def test_steps_that_say_nothing_of_copies_change_nothing() -> None:
    steps = Steps()
    before = steps.allowed
    steps.run(0.5, 30)  # before it is known what a step takes without them
    steps.run(0.010)
    steps.run(0.5, 30, kind=Kind.PREFILL)
    steps.run(0.5, 30, error=RuntimeError("lost"))
    steps.run(0.5, 30, waited_for_compiler=True)
    assert steps.allowed == before < 40


def test_pages_are_copied_at_full_speed_where_none_decodes() -> None:
    steps = Steps()
    assert steps.scheduler.budget.restores(has_decodes=False) == 40
