"""The cost of guesses is measured by the steps that run."""

import random

from quire.core.plan import Chunk, Kind
from quire.core.scheduler import Scheduler
from quire.engine.limits.guess_costs import HALVED_STEPS, MAX_COST
from quire.engine.limits.step_limits import StepLimits
from quire.engine.observer import Step
from tests.core.harness import limits
from tests.fake_executor import plan_of


class Steps:
    def __init__(self, fixed_tokens: float) -> None:
        scheduler = Scheduler(limits(max_guesses=3), lambda: 0.0)
        self.budget = scheduler.budget
        self.budget.fixed_tokens = fixed_tokens
        self.limits = StepLimits(scheduler, max_burst_s=0.01, max_step_s=0.0)

    def run(
        self,
        num_tokens: int,
        took_s: float,
        kind: Kind = Kind.VERIFY,
        error: Exception | None = None,
        burst: int = 1,
        forced_after: int = 0,
    ) -> None:
        chunks = [Chunk(1, 0, 0, 0, kind, 5, num_tokens, (), True)]
        if forced_after:
            chunks.append(Chunk(2, 0, 0, 1, Kind.FORCED, 5, forced_after, (), True))
        self.limits.step_ended(Step(plan_of(1, chunks, burst=burst), 0.0, 0.0, took_s=took_s, error=error))


def test_the_tokens_that_a_step_costs_are_found_in_noise() -> None:
    steps, chance = Steps(12.0), random.Random(0)
    for _ in range(300):
        tokens = chance.choice([1, 2, 4, 8])
        steps.run(tokens, (0.010 + 0.0005 * tokens) * chance.uniform(0.8, 1.3))
    assert 14 < steps.budget.fixed_tokens < 28  # 20 without the noise


def test_padding_counts() -> None:
    steps = Steps(12.0)
    steps.budget.padded_sizes = (1, 8)
    for tokens in (1, 2, 5, 8) * 10:
        steps.run(tokens, 0.010 + 0.001 * (1 if tokens == 1 else 8))
    assert abs(steps.budget.fixed_tokens - 10) < 0.01


def test_steps_of_one_size_and_others_than_decodes_say_nothing() -> None:
    steps = Steps(12.0)
    for _ in range(20):
        steps.run(4, 0.010)
        steps.run(30, 0.5, kind=Kind.PREFILL)
        steps.run(30, 0.5, error=RuntimeError("lost"))
    assert steps.budget.fixed_tokens == 12


def test_a_disturbed_machine_does_not_lead_far_away() -> None:
    steps = Steps(12.0)
    for tokens in (1, 8) * 20:
        steps.run(tokens, 1.0 if tokens == 1 else 0.1)
        steps.run(tokens, 0.01 * tokens)
    assert 4 < steps.budget.fixed_tokens < 31


def test_a_step_with_guesses_is_compared_with_the_tokens_of_a_burst() -> None:
    steps = Steps(100.0)
    for _ in range(20):
        steps.run(4, 0.004, kind=Kind.DECODE, burst=4)  # 1 ms a token
        steps.run(8, 0.004)
    assert 3.5 < steps.budget.guessing_cost < 4
    for _ in range(200):
        steps.run(8, 0.001)
    assert steps.budget.guessing_cost == 1


def test_no_step_with_guesses_costs_less_than_another_and_none_more_than_so_much() -> None:
    steps = Steps(100.0)
    for _ in range(20):
        steps.run(1, 0.004, kind=Kind.DECODE)
        steps.run(8, 0.004)
    assert steps.budget.guessing_cost == 1
    for _ in range(20):
        steps.run(1, 1e-9, kind=Kind.DECODE)
        steps.run(8, 4.0)
    assert steps.budget.guessing_cost == MAX_COST


def test_one_disturbed_step_changes_little() -> None:
    steps = Steps(100.0)
    for number in range(40):
        steps.run(1, 0.004, kind=Kind.DECODE)
        steps.run(2, 2.0 if number == 20 else 0.004)
    assert steps.budget.guessing_cost == 1


def test_the_times_of_sizes_are_learnt_and_forgotten() -> None:
    """Kernels that compute four tokens at a time: a step of five takes as long as one of eight."""
    steps, took_s = Steps(12.0), {1: 0.010, 4: 0.015, 5: 0.024, 8: 0.024}
    for _ in range(50):
        for tokens in (1, 4, 5, 8):
            steps.run(tokens, took_s[tokens], kind=Kind.VERIFY if tokens > 1 else Kind.DECODE)
    costs = {tokens: steps.budget.cost(tokens, tokens > 1) / steps.budget.cost(1, False) for tokens in took_s}
    for tokens, seconds in took_s.items():
        assert abs(costs[tokens] - seconds / 0.010) < 0.25
    for _ in range(20):
        for tokens in (1, 2) * HALVED_STEPS:
            steps.run(tokens, 0.010, kind=Kind.VERIFY if tokens > 1 else Kind.DECODE)
    assert abs(steps.budget.size_costs[True, 5] - 1) < 0.05


def test_a_disturbed_step_is_not_blamed_on_its_size() -> None:
    steps = Steps(12.0)
    for number in range(40):
        steps.run(1, 0.010, kind=Kind.DECODE)
        steps.run(4, 10.0 if number == 20 else 0.013)
    assert steps.budget.cost(4, True) / steps.budget.cost(1, False) < 1.5


def test_a_step_with_guesses_counts_as_such_if_tokens_that_are_forced_follow_them() -> None:
    steps = Steps(12.0)
    for _ in range(20):
        steps.run(4, 0.010, kind=Kind.DECODE, burst=4)
        steps.run(2, 0.080, forced_after=2)
    assert steps.budget.guessing_cost > 2
