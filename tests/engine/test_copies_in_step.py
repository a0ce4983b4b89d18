"""Pages that come from the host do not slow the steps of others by more than a twentieth."""

import random
from collections.abc import Callable

import pytest

from quire.core.plan import Chunk, Kind, PageCopy, Place, Tier
from quire.core.scheduler import Scheduler
from quire.engine.limits.restores import CopiesInStep
from quire.engine.limits.step_limits import StepLimits
from quire.engine.observer import Step
from tests.core.harness import limits
from tests.fake_executor import plan_of


class Steps:
    def __init__(self, **changes: object) -> None:
        self.scheduler = Scheduler(limits(host_pages=100, max_page_restores=40, **changes), lambda: 0.0)
        self.limit = StepLimits(self.scheduler, max_burst_s=0.01, max_step_s=0.0)

    @property
    def allowed(self) -> int:
        return self.scheduler.budget.restores(has_decodes=True)

    def run(
        self, took_s: float, num_restored: int = 0, kind: Kind = Kind.DECODE, length: int = 1, **changes: object
    ) -> None:
        """As many pages go to the host as come from it."""
        device, host = Place(Tier.DEVICE, 1), Place(Tier.HOST, 1)
        copies = (PageCopy(device, host), PageCopy(host, device)) * num_restored
        plan = plan_of(1, (Chunk(1, 0, 0, 0, kind, 5, length, (), True),), copies=copies)
        self.limit.step_ended(Step(plan, 0.0, 0.0, took_s=took_s, **changes))  # type: ignore[arg-type]

    def alternate(self, count: int, alone_s: float, added_s: Callable[[int], float], noise: float = 0.03) -> list[int]:
        """Steps without copies and with as many as are allowed, which add `added_s` of their number. Returns the
        numbers."""
        chance, allowed = random.Random(0), []
        for _ in range(count):
            self.run(alone_s * chance.uniform(1 - noise, 1 + noise))
            allowed.append(self.allowed)
            self.run((alone_s + added_s(self.allowed)) * chance.uniform(1 - noise, 1 + noise), self.allowed)
        return allowed


@pytest.mark.parametrize(
    ("compute_page_s", "steps", "allowed"),
    [
        (None, [(2, 10), (4, 10), (8, 10), (16, 10), (32, 10)], [4, 8, 16, 32, 40]),
        (None, [(2, 10.2), (4, 10.4), (5, 10.5), (5, 10.5)], [4, 5, 5, 5]),
        (None, [(2, 10), (4, 10), (8, 18), (1, 11), (1, 10)], [4, 8, 1, 1, 1]),
        (0.003, [(2, 12), (5, 15), (5, 15)], [5, 5, 5]),
        (0.0009, [(2, 12), (1, 11)], [1, 1]),
    ],
    ids=["free", "a tenth of a millisecond each", "one has waited", "computing takes longer", "computing is sooner"],
)
def test_the_pages_in_a_step_by_what_the_last_ones_added(
    compute_page_s: float | None, steps: list[tuple[int, float]], allowed: list[int]
) -> None:
    """Pages from the host, and milliseconds of the step; 10 without pages."""
    copies, found = CopiesInStep(2), []
    for num_restored, took_ms in steps:
        copies = copies.after(num_restored, took_ms / 1000, 0.010, compute_page_s, most=40)
        found.append(copies.num_pages)
    assert found == allowed


def test_as_many_pages_are_copied_as_add_a_twentieth() -> None:
    steps = Steps()
    allowed = steps.alternate(100, 0.100, lambda pages: 0.0005 * pages)[20:]
    assert 6 <= sum(allowed) / len(allowed) <= 16  # 10 without the noise


def test_pages_that_are_copied_beside_computation_are_copied_until_they_take_longer() -> None:
    def added_s(pages: int) -> float:
        return max(0.0, pages * 0.0002 - 0.005)  # 25 take as long as a step

    allowed = Steps().alternate(100, 0.005, added_s, noise=0.005)[20:]
    assert sum(allowed) / len(allowed) >= 18
    assert sum(map(added_s, allowed)) / len(allowed) <= 0.05 * 0.005


def test_the_limit_follows_when_copies_get_slower_and_faster() -> None:
    steps = Steps()
    steps.alternate(20, 0.010, lambda pages: 0.0, noise=0.0)
    assert steps.allowed == 40
    steps.alternate(20, 0.010, lambda pages: 0.0001 * pages, noise=0.0)
    assert steps.allowed == 5
    steps.alternate(20, 0.010, lambda pages: 0.00001 * pages, noise=0.0)
    assert 35 <= steps.allowed <= 40


def test_one_page_is_copied_however_long_it_takes() -> None:
    steps = Steps()
    for _ in range(5):
        steps.run(0.010)
        steps.run(0.100, 2)
    assert steps.allowed == 1


def test_copies_that_take_no_time_are_held_to_the_limit_of_a_step() -> None:
    steps = Steps()
    assert steps.alternate(6, 0.010, lambda pages: 0.0, noise=0.0) == [2, 4, 8, 16, 32, 40]


def test_no_fewer_pages_are_copied_than_a_step_could_compute() -> None:
    """Else the prompt would be there earlier if it were computed, and the others would be slowed by that."""
    steps = Steps(page_size=32)
    for num_tokens in (128, 256, 512) * 10:  # a page in 10 ms
        steps.run(0.049)
        steps.run(0.049 + 0.010 * num_tokens / 32, kind=Kind.PREFILL, length=num_tokens)
    steps.alternate(40, 0.049, lambda pages: 0.005 * pages, noise=0.0)
    assert 8 <= steps.allowed <= 12  # 5 ms are saved by each
    steps.alternate(40, 0.050, lambda pages: 0.020 * pages, noise=0.0)
    assert steps.allowed == 1, "copying takes longer than computing, whatever is copied in a step"


def test_steps_that_say_nothing_of_copies_change_nothing() -> None:
    steps = Steps()
    before = steps.allowed
    steps.run(0.5, 30)  # before it is known what a step takes without them
    steps.run(0.010)
    steps.run(0.5, 30, kind=Kind.PREFILL)
    steps.run(0.5, 30, kind=Kind.FORCED)
    steps.run(0.5, 30, error=RuntimeError("lost"))
    steps.run(0.5, 30, waited_for_compiler=True)
    assert steps.allowed == before < 40


def test_pages_are_copied_at_full_speed_where_none_decodes() -> None:
    steps = Steps()
    assert steps.scheduler.budget.restores(has_decodes=False) == 40
