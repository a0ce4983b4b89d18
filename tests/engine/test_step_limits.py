"""One measurement of steps, and everything that is decided by it."""

import pytest

from quire.core.plan import Chunk, Kind, PageCopy, Place, StepPlan, Tier
from quire.core.scheduler import Scheduler
from quire.engine.limits.step_limits import MIN_PAUSE, Bursts, StepLimits, prompt_tokens_beside
from quire.engine.limits.step_times import StepKind, StepLoad, StepTimes
from quire.engine.observer import Step
from tests.core.harness import limits
from tests.fake_executor import plan_of

GPU = (0.005, 0.00001, 0.0000001, 0.000024, 0.000000001)  # seconds of a step, then by the fields of its load
CHUNKS = {"decode": Kind.DECODE, "guess": Kind.VERIFY, "force": Kind.FORCED, "prompt": Kind.PREFILL}


def plan(*rows: tuple[str, int], burst: int = 1, num_restored: int = 0) -> StepPlan:
    """`rows`: what is computed, and the number of tokens."""
    chunks = [Chunk(n, 0, 0, n, CHUNKS[what], 1000, length, (), True) for n, (what, length) in enumerate(rows)]
    copies = (PageCopy(Place(Tier.HOST, 1), Place(Tier.DEVICE, 1)),) * num_restored
    return plan_of(1, chunks, burst=burst, copies=copies)


DECODES = [("decode", 1)] * 8


@pytest.mark.parametrize(
    ("rows", "burst", "kind", "load"),
    [
        ([("decode", 1), ("decode", 1)], 1, StepKind.SINGLE, (2, 2002, 0, 0)),
        ([("decode", 4), ("decode", 4)], 4, StepKind.BURST, (2, 2002, 0, 0)),
        ([("decode", 1), ("guess", 3)], 1, StepKind.GUESSES, (4, 2002, 0, 0)),
        ([("decode", 1), ("guess", 3), ("force", 5)], 1, StepKind.GUESSES, (4, 2002, 5, 5 * 1002)),
        ([("decode", 1), ("force", 5)], 1, StepKind.FORCED, (1, 1001, 5, 5 * 1002)),
        ([("decode", 1), ("prompt", 10)], 1, StepKind.PROMPTS, (1, 1001, 10, 10 * 1005)),
        ([("guess", 2), ("prompt", 10)], 1, StepKind.PROMPTS, (2, 1001, 10, 10 * 1005)),
    ],
)
def test_a_step_is_of_the_kind_that_its_plan_counts(rows, burst, kind, load):
    of = plan(*rows, burst=burst)
    assert StepKind.of(of) is kind
    assert StepLoad.of(of) == load


def test_a_step_that_failed_or_waited_for_a_compiler_says_nothing():
    times = StepTimes()
    for changes in ({"error": RuntimeError("lost")}, {"waited_for_compiler": True}):
        assert times.measure(Step(plan(*DECODES), 0.0, 0.0, took_s=1.0, **changes)) is None
    assert times.measure(Step(plan(), 0.0, 0.0, took_s=1.0)) is None, "pages alone"
    assert times.recent_s(StepKind.SINGLE) is None


def test_the_time_to_compute_a_prompt_is_known_from_prompts():
    times = StepTimes()
    assert times.prompt_s(1000, num_cached=0, step_tokens=512) is None
    now = 0.0
    for number in range(300):
        rows = DECODES if number % 3 else [*DECODES, ("prompt", 128 << number % 5)]
        load = StepLoad.of(plan(*rows))
        took_s = sum(seconds * count for seconds, count in zip(GPU, (1, *load), strict=True))
        now += 0.1
        times.measure(Step(plan(*rows), 0.0, 0.0, took_s=took_s, ended_s=now))
    for num_cached in (0, 2000):
        expected = 2 * 0.005 + 1000 * 0.000024 + 1000 * (num_cached + 500) * 0.000000001
        assert times.prompt_s(1000, num_cached, step_tokens=512) == pytest.approx(expected, rel=0.15)
    beside = 32 * 0.000024 + 32 * 1500 * 0.000000001
    assert times.prompt_beside_s(32) == pytest.approx(beside, rel=0.15)


class Served:
    """Steps on a clock of their own, and what they may hold."""

    def __init__(self, **changes: object) -> None:
        chosen = {
            "page_size": 32, "num_pages": 4000, "max_batch_size": 16, "max_batch_prefill_tokens": 2048,
            "max_step_tokens": 2064, "max_sequence_tokens": 10_000, "host_pages": 100, "max_burst": 4,
        }  # fmt: skip
        self.scheduler = Scheduler(limits(**(chosen | changes)), lambda: 0.0)
        self.limits = StepLimits(self.scheduler, max_burst_s=0.010, max_step_s=0.025)
        self.now = 0.0

    @property
    def num_prompt(self) -> int:
        return self.scheduler.budget.max_prefill_beside_decodes or 0

    @property
    def burst(self) -> int:
        return self.scheduler.budget.burst

    def run(self, *rows: tuple[str, int], burst: int = 1, waited_s: float = 0.0, took_s: float | None = None) -> None:
        """A step that waits for pages from the host, if it waits, after it has computed."""
        of = plan(*rows, burst=burst, num_restored=16 if waited_s else 0)
        if took_s is None:
            took_s = sum(seconds * count for seconds, count in zip(GPU, (1, *StepLoad.of(of)), strict=True))
        self.now += took_s + waited_s
        step = Step(of, 0.0, 0.0, took_s=took_s + waited_s, ended_s=self.now, copies_waited_s=waited_s)
        self.limits.step_ended(step)


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_that_wait_for_pages_leave_prompts_their_share(ahead: bool):
    served = Served(restores_ahead=ahead)
    for _ in range(200):
        served.run(*DECODES)
        served.run(*DECODES, ("prompt", served.num_prompt))
    before = served.num_prompt
    assert before > 700
    for _ in range(40):
        served.run(*DECODES, ("prompt", served.num_prompt), waited_s=0.020)
    assert served.num_prompt == pytest.approx(before, rel=0.05)


def test_steps_that_wait_for_pages_leave_bursts_alone():
    served = Served(restores_ahead=True)
    for _ in range(20):
        served.run(*DECODES, took_s=0.002)
        served.run(*DECODES, took_s=0.002, waited_s=0.030)
    assert served.burst == 4


def test_bursts_go_on_if_the_one_behind_a_disturbed_one_was_short():
    """Both were under way when the first was judged."""
    served = Served()
    rows = [("decode", 4)] * 8
    served.run(*rows, burst=4, took_s=0.060)
    assert served.burst == 1
    served.run(*rows, burst=4, took_s=0.006)
    assert served.burst == 4


@pytest.mark.parametrize(
    ("steps", "allowed"),
    [
        ([], True),
        ([("single", 2)], True),
        ([("single", 3)], False),
        ([("single", 3), ("single", 2)], True),
        ([("burst", 2), ("single", 3)], True),  # bursts are judged by bursts
        ([("burst", 3)], False),
        ([("burst", 3), ("single", 2)], True),
        ([("burst", 3), ("single", 3)], False),
        ([("burst", 3), *[("single", 3)] * (2 * MIN_PAUSE - 1)], False),
        ([("burst", 3), *[("single", 3)] * 2 * MIN_PAUSE], True),  # one is tried
        ([("burst", 3), *[("single", 3)] * 2 * MIN_PAUSE, ("burst", 3), *[("single", 3)] * 2 * MIN_PAUSE], False),
        ([("burst", 3), ("burst", 2), ("single", 3)], True),
    ],
)
def test_bursts_are_allowed_by_the_time_of_a_token(steps, allowed):
    """At most 2.5 ms in each case."""
    bursts = Bursts()
    for what, ms in steps:
        bursts = bursts.after_burst(ms, 2.5) if what == "burst" else bursts.after_single(ms, 2.5)
    assert bursts.are_allowed is allowed


@pytest.mark.parametrize(
    ("max_step_s", "most", "tokens"),
    [
        (0.025, 2048, 703),  # (25 - 5 - 0.08 - 0.8 ms) / (24 us + 1.3 us)
        (0.050, 2048, 1024),  # twice the largest so far
        (0.050, 512, 512),
        (0.005, 2048, 64),  # decodes alone take longer: a thirty-second
        (0.005, 256, 16),
    ],
)
def test_prompts_beside_decodes_fill_a_step(max_step_s: float, most: int, tokens: int):
    times, load = StepTimes(), StepLoad(8, 8008, 512, 512 * 1256)
    for number in range(400):
        measured = load if number % 2 else load._replace(num_prefill_tokens=0, prefill_pairs=0)
        rows = [*DECODES, ("prompt", 512)] if number % 2 else DECODES
        took_s = sum(seconds * count for seconds, count in zip(GPU, (1, *measured), strict=True))
        times.measure(Step(plan(*rows), 0.0, 0.0, took_s=took_s, ended_s=float(number)))
    assert prompt_tokens_beside(times, load, max_step_s, most) == pytest.approx(tokens, rel=0.2)


def test_an_engine_has_limits_only_where_it_has_a_use_for_them():
    served = Served(max_burst=1, host_pages=0)
    budget = served.scheduler.budget
    served.run(*DECODES, took_s=1.0)
    assert (budget.burst, budget.max_restores_beside_decodes, budget.guessing_cost) == (1, None, 1.0)
    assert served.limits.times.guess_costs is None
