"""Pages that come from the host beside decodes are as many as come in the time of a step."""

import random

import pytest

from quire.core.plan import Chunk, Kind, PageCopy, Place, Tier
from quire.core.scheduler import Scheduler
from quire.engine.limits.restores import BLOCK, FEW_PAGES, CopiesBesideStep
from quire.engine.limits.step_limits import StepLimits
from quire.engine.observer import Step
from quire.executor.host.stacks import BLOCK_PAGES
from tests.core.harness import limits
from tests.fake_executor import plan_of

MOST = 200


class Steps:
    """Steps beside which pages are copied, each for a time of its own."""

    def __init__(self, num_groups: int = 1) -> None:
        groups = (None,) * num_groups
        chosen = limits(host_pages=1000, max_page_restores=MOST, restores_ahead=True, page_groups=groups)
        self.scheduler = Scheduler(chosen, lambda: 0.0)
        self.limits = StepLimits(self.scheduler, max_burst_s=0.01, max_step_s=0.0)

    @property
    def allowed(self) -> int:
        return self.scheduler.budget.restores(has_decodes=True)

    def run(self, num_restored: int, computed_s: float, page_s: float, kind: Kind = Kind.DECODE, **changes: object):
        copies = (PageCopy(Place(Tier.HOST, 1), Place(Tier.DEVICE, 1)),) * num_restored
        plan = plan_of(1, (Chunk(1, 0, 0, 0, kind, 5, 1, (), True),), copies=copies)
        waited_s = max(0.0, num_restored * page_s - computed_s)
        took_s = computed_s + waited_s
        self.limits.step_ended(Step(plan, 0.0, 0.0, took_s=took_s, copies_waited_s=waited_s, **changes))  # type: ignore[arg-type]
        return took_s


@pytest.mark.parametrize(
    ("steps", "allowed"),
    [
        ([(16, 5, 0), (32, 5, 0), (64, 5, 0), (128, 5, 0), (192, 5, 0)], [32, 64, 128, 192, 192]),
        ([(16, 5, 0), (32, 5, 0), (64, 8, 3), (32, 5, 0), (1, 5.3, 0.3), (32, 5, 0)], [32, 64, 32, 32, 32, 32]),
        ([(16, 5, 0), (32, 5, 0), (64, 5, 0), (128, 7, 0), (80, 5.5, 0), (64, 5.5, 0)], [32, 64, 128, 80, 64, 48]),
        ([(16, 100, 95), (8, 100, 95), (4, 100, 95), (2, 100, 95), (1, 100, 95)], [8, 4, 2, 1, 1]),
        ([(0, 5, 0), (15, 5, 0), (7, 5, 0)], [16, 16, 16]),
    ],
    ids=["all in time", "one waits", "the host is slow", "all wait", "fewer than allowed"],
)
def test_the_pages_beside_a_step_by_what_the_last_ones_took(steps: list[tuple[int, float, float]], allowed: list[int]):
    """Pages from the host, milliseconds of the step, and those that it waited for them; 5 without pages."""
    copies, found = CopiesBesideStep(16), []
    for num_restored, took_ms, waited_ms in steps:
        is_slowed = took_ms - waited_ms > 5.25
        took_s, waited_s = took_ms / 1000, waited_ms / 1000
        copies = copies.after(num_restored, took_s, waited_s, 0.005, is_slowed=is_slowed, row=1, most=MOST)
        found.append(copies.num_pages)
    assert found == allowed


@pytest.mark.parametrize(("page_s", "fitting"), [(0.0001, 50), (0.001, 5), (0.00001, MOST)])
def test_a_step_copies_what_comes_in_its_time(page_s: float, fitting: int) -> None:
    steps, chance = Steps(), random.Random(0)
    for _ in range(20):
        steps.run(steps.allowed, 0.005, page_s)
    found, slowdowns = [], []
    for _ in range(200):
        computed_s = 0.005 * chance.uniform(0.97, 1.03)
        found.append(steps.allowed)
        slowdowns.append(steps.run(steps.allowed, computed_s, page_s) / computed_s - 1)
    assert 0.8 * fitting <= sum(found) / len(found) <= 1.05 * fitting
    assert sum(slowdowns) / len(slowdowns) <= (0.03 if fitting > 5 else 0.1)


def test_the_pace_follows_steps_that_get_longer_and_shorter() -> None:
    steps = Steps()
    for _ in range(60):
        steps.run(steps.allowed, 0.005, 0.0001)
    for computed_s, fitting in ((0.005, 48), (0.015, 144), (0.002, 16), (0.0005, 5), (0.005, 48)):
        for _ in range(20):
            steps.run(0, computed_s, 0.0001)
        assert 0.6 * fitting <= steps.allowed <= 1.4 * fitting
        for _ in range(60):
            steps.run(steps.allowed, computed_s, 0.0001)
        assert 0.8 * fitting <= steps.allowed <= fitting + 16


@pytest.mark.parametrize(
    ("host_page_s", "least", "most"),
    [(0.0001, 48, 48), (0.00003, 48, 64), (0.000018, 80, 112), (0.000001, 192, 192)],
)
def test_a_step_copies_what_the_host_can_begin_in_its_time(host_page_s: float, least: int, most: int) -> None:
    """No fewer than a few, however long that takes."""
    steps, found = Steps(), []
    for _ in range(20):
        steps.run(0, 0.005, 0.0)
    for _ in range(200):
        found.append(steps.allowed)
        steps.run(steps.allowed, max(0.005, 0.0035 + steps.allowed * host_page_s), 0.00001)
        steps.run(0, 0.005, 0.0)
    assert least <= min(found[50:]) <= max(found[50:]) <= most


def test_slow_steps_with_copies_are_not_the_time_of_a_step() -> None:
    steps = Steps()
    for _ in range(20):
        steps.run(0, 0.005, 0.0)
    for _ in range(100):
        steps.run(steps.allowed, 0.007, 0.00001)
    assert steps.allowed == FEW_PAGES


def test_one_page_is_copied_however_long_it_takes() -> None:
    steps = Steps()
    for _ in range(5):
        steps.run(steps.allowed, 0.005, 1.0)
    assert steps.allowed == 1


def test_steps_that_say_nothing_of_the_pace_change_nothing() -> None:
    steps = Steps()
    before = steps.allowed
    steps.run(0, 0.005, 0.0001)  # before any copy
    steps.run(before - 1, 0.005, 0.0001)  # fewer than might have come
    steps.run(50, 0.005, 1.0, kind=Kind.PREFILL)
    steps.run(50, 0.005, 1.0, error=RuntimeError("lost"))
    steps.run(50, 0.005, 1.0, waited_for_compiler=True)
    assert steps.allowed == before


@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("first_page_s", [0.00001, 1.0])
def test_the_pace_grows_with_whole_rows_of_pages_of_several_groups(num_groups: int, first_page_s: float) -> None:
    """One row at least, which may be more than is allowed."""
    steps = Steps(num_groups)

    def restore(page_s: float) -> None:
        steps.run(max(num_groups, steps.allowed - steps.allowed % num_groups), 0.005, page_s)

    for _ in range(10):
        restore(first_page_s)
    for _ in range(600):
        restore(0.00001)
    assert steps.allowed == MOST - MOST % BLOCK


def test_a_few_pages_that_are_late_do_not_change_the_pace_of_many() -> None:
    steps = Steps()
    for _ in range(40):
        steps.run(steps.allowed, 0.005, 0.00002)
    assert steps.allowed == 192
    steps.run(1, 0.005, 0.0053)
    assert steps.allowed == 192
    steps.run(0, 0.005, 0.00002)
    assert steps.allowed == 192


def test_one_step_lowers_the_pace_to_half_at_most() -> None:
    steps = Steps()
    for _ in range(40):
        steps.run(steps.allowed, 0.005, 0.00002)
    steps.run(192, 0.005, 1.0)
    assert steps.allowed == 96
    steps.run(0, 0.005, 0.00002)
    assert steps.allowed == 96
    steps.run(96, 0.005, 1.0)
    assert steps.allowed == 48


def test_the_pace_is_in_blocks_of_the_executor() -> None:
    assert BLOCK == BLOCK_PAGES
