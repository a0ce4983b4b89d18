"""Predictions of step times follow what steps take, and bound the prompts beside decodes."""

import random

import pytest

from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.limits.step_limits import MIN_PREFILL_TOKENS
from quire.engine.limits.step_times import LinearTime, StepLoad
from tests.core.harness import limits, request
from tests.fake_executor import FakeExecutor

GPU = (0.005, 0.00001, 0.0000001, 0.000024, 0.000000001)  # an 8B model on one H200, about
CPU = (0.08, 0.004, 0.000001, 0.006, 0.000001)


def time_of(machine: tuple[float, ...], load: StepLoad) -> float:
    return sum(seconds * count for seconds, count in zip(machine, (1, *load), strict=True))


def loads(count: int, seed: int = 0) -> list[StepLoad]:
    """Decodes, and every now and then some hundred tokens of a prompt beside them."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        num_decodes = chance.randint(1, 64)
        num_prefill = chance.choice((0, 0, 0, chance.randint(16, 2000)))
        pairs = num_prefill * chance.randint(0, 2000)
        made.append(StepLoad(num_decodes, num_decodes * chance.randint(100, 2000), num_prefill, pairs))
    return made


def error_of(model: LinearTime, machine: tuple[float, ...]) -> float:
    """The mean error of predictions for steps that it has not seen, as a share of their time."""
    unseen = loads(100, seed=99)
    return sum(abs(model.predict(one) / time_of(machine, one) - 1) for one in unseen) / len(unseen)


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_times_are_predicted_after_a_few_hundred_steps(machine, noise):
    model, chance = LinearTime(), random.Random(1)
    for load in loads(400):
        model.measure(load, time_of(machine, load) * (1 + chance.uniform(-noise, noise)))
    assert error_of(model, machine) < 0.1


def test_twenty_steps_are_enough_for_an_estimate():
    model = LinearTime()
    for load in loads(20):
        model.measure(load, time_of(GPU, load))
    assert error_of(model, GPU) < 0.4


def test_a_step_that_stood_still_changes_little():
    model = LinearTime()
    for load in loads(300):
        model.measure(load, time_of(GPU, load))
    load = StepLoad(32, 32_000, 500, 250_000)
    before = model.predict(load)
    model.measure(load, 60.0)
    assert model.predict(load) == pytest.approx(before, rel=0.3)
    for one in loads(100, seed=2):
        model.measure(one, time_of(GPU, one))
    assert error_of(model, GPU) < 0.1


def test_two_steps_whose_results_arrive_together_are_no_fast_step():
    """The host was late for the first: it seems to have taken the time of both, and the second none."""
    model, chance = LinearTime(), random.Random(3)
    late_s = 0.0
    for load in loads(600):
        took_s = time_of(GPU, load)
        if late_s:
            model.measure(load, 0.0001)
            late_s = 0.0
        elif chance.random() < 0.05:
            late_s = took_s
            model.measure(load, 2 * took_s)
        else:
            model.measure(load, took_s)
    assert error_of(model, GPU) < 0.2


def test_predictions_follow_a_machine_that_becomes_slower():
    model = LinearTime()
    slower = tuple(2 * seconds for seconds in GPU)
    for load in loads(300):
        model.measure(load, time_of(GPU, load))
    for load in loads(200, seed=5):
        model.measure(load, time_of(slower, load))
    assert error_of(model, slower) < 0.15


def test_hours_of_decodes_alone_leave_what_is_known_of_prompts():
    model = LinearTime()
    for load in loads(300):
        model.measure(load, time_of(GPU, load))
    decodes = StepLoad(8, 8000)
    for _ in range(20_000):
        model.measure(decodes, time_of(GPU, decodes))
    mixed = StepLoad(8, 8000, 1000, 500_000)
    assert model.predict(mixed) == pytest.approx(time_of(GPU, mixed), rel=0.3)


def test_the_tokens_that_fit_into_a_time_are_predicted_to_take_it():
    model = LinearTime()
    for load in loads(400):
        model.measure(load, time_of(GPU, load))
    beside = StepLoad(32, 32_000, 100, 100 * 700)
    tokens = model.prefill_tokens_within(0.025, beside)
    predicted_s = model.predict(beside._replace(num_prefill_tokens=tokens, prefill_pairs=tokens * 700))
    assert predicted_s == pytest.approx(0.025)
    assert tokens == pytest.approx((0.025 - 0.005 - 0.00032 - 0.0032) / (0.000024 + 0.0000007), rel=0.1)
    assert model.prefill_tokens_within(0.001, beside) == 0


class Served:
    """An engine on a clock of its own, whose steps take as long as those of `machine`."""

    def __init__(
        self, machine: tuple[float, ...], max_step_s: float, lookahead: int = 1, max_prefill: int = 2048
    ) -> None:
        self.now = 0.0
        self.machine = machine
        self.hiccup_s = 0.0  # longer for the next step
        self.steps: list[tuple[StepLoad, float]] = []
        chosen = limits(num_pages=4000, max_batch_size=16, max_batch_prefill_tokens=max_prefill,
                        max_step_tokens=max_prefill + 16, max_sequence_tokens=10_000)  # fmt: skip
        executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, self._take_time)
        scheduler = Scheduler(chosen, self.clock)
        self.engine = Engine(scheduler, executor, lookahead, max_step_s=max_step_s, clock=self.clock)
        self.finished: set[int] = set()

    def clock(self) -> float:
        return self.now

    def _take_time(self, plan: StepPlan, prompts: object) -> None:
        load = StepLoad.of(plan)
        took_s = time_of(self.machine, load)
        self.steps.append((load, took_s))
        self.now += took_s + self.hiccup_s
        self.hiccup_s = 0.0

    def add(self, request_id: int, num_prompt: int, max_tokens: int) -> None:
        prompt = tuple(1000 + (request_id * 7919 + n) % 1000 for n in range(num_prompt))
        self.engine.add(request(request_id, prompt=prompt, max_tokens=max_tokens))

    def run(self, num_steps: int = 100_000) -> None:
        for _ in range(num_steps):
            if self.engine.is_idle:
                return
            self.finished.update(self.engine.step().finished)

    def mixed(self) -> list[tuple[StepLoad, float]]:
        """The steps in which prompts run beside decodes."""
        return [(load, took_s) for load, took_s in self.steps if load.num_decodes and load.num_prefill_tokens]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("machine", "max_step_s", "max_prefill"), [(GPU, 0.025, 2048), (CPU, 0.5, 512)])
def test_prompts_that_arrive_while_others_decode_are_cut_to_the_time_of_a_step(
    machine, max_step_s, max_prefill, lookahead
):
    served = Served(machine, max_step_s, lookahead, max_prefill)
    for index in range(8):
        served.add(index, num_prompt=50 + index, max_tokens=3000)
    served.run(40)
    served.steps.clear()
    served.add(100, num_prompt=6000, max_tokens=5)
    served.run(300)
    assert 100 in served.finished
    times = [took_s for _, took_s in served.mixed()]
    assert max(times) < 1.6 * max_step_s, "before such a step was measured"
    assert max(times[3:]) < 1.1 * max_step_s
    assert min(times[3:-1]) > 0.8 * max_step_s, "the time is used"


def test_a_prompt_alone_runs_at_full_speed():
    served = Served(GPU, max_step_s=0.005)
    for index in range(4):
        served.add(index, num_prompt=6000, max_tokens=1)
    served.run()
    assert max(load.num_prefill_tokens for load, _ in served.steps) == 2048


def test_prompts_get_their_share_however_long_decodes_take():
    served = Served(CPU, max_step_s=0.01)
    for index in range(8):
        served.add(index, num_prompt=20, max_tokens=2000)
    served.run(60)
    served.add(100, num_prompt=1000, max_tokens=2)
    served.run(60)
    assert 100 in served.finished
    assert min(load.num_prefill_tokens for load, _ in served.mixed()[:-1]) >= MIN_PREFILL_TOKENS


def test_a_step_that_stood_still_does_not_starve_prompts():
    served = Served(GPU, max_step_s=0.025)
    for index in range(8):
        served.add(index, num_prompt=50, max_tokens=3000)
    served.run(40)
    served.add(100, num_prompt=9000, max_tokens=1)
    served.run(3)
    served.hiccup_s = 60.0
    served.steps.clear()
    served.run(60)
    assert 100 in served.finished
    assert min(load.num_prefill_tokens for load, _ in served.mixed()[:-1]) > 250


def test_without_a_limit_prompts_are_not_cut():
    served = Served(GPU, max_step_s=0.0)
    served.add(1, num_prompt=20, max_tokens=50)
    served.run(5)
    served.add(2, num_prompt=6000, max_tokens=1)
    served.run()
    assert max(load.num_prefill_tokens for load, _ in served.mixed()) == 2048
