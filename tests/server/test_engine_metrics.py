"""Metrics of the engine, as /metrics shows them."""

import msgspec
import pytest

from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.engine.driver import Driver
from quire.engine.engine import Engine as QuireEngine
from quire.engine.meter import attach_meter, read_stats
from quire.ipc.messages import Event, Progress, Stats, Submit
from quire.server.observe.endpoint_metrics import write_endpoint
from quire.server.observe.engine_metrics import JOINED, SUMMED, sum_stats, write_engines
from quire.server.observe.exposition import Exposition
from tests.core.harness import GREEDY, limits, request
from tests.engine.toy_grammars import END, ToyGrammars, toy
from tests.fake_executor import FakeExecutor, Fault

STEP_S = 1.0
DELIVERY_S = 0.25


class Engine:
    """A metered engine whose turns are taken here, on a clock of its own: steps and deliveries take fixed times."""

    def __init__(self, lookahead: int = 1, faults: dict[str, Fault] | None = None, **changes: object) -> None:
        self.now = 100.0
        chosen = limits(**({"num_pages": 100} | changes))
        faults = dict(faults or {})
        fault = faults.pop("before_result", None)

        def before_result(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
            self.now += STEP_S
            if fault is not None:
                fault(plan, prompts)

        self.executor = FakeExecutor(
            chosen.num_pages,
            4,
            chosen.max_batch_size,
            before_result=before_result,
            guess_percent=80 if chosen.max_guesses else None,
            num_host_pages=chosen.host_pages,
            **faults,
        )
        scheduler = Scheduler(chosen, self.clock)
        self.engine = QuireEngine(scheduler, self.executor, lookahead, ToyGrammars(), clock=self.clock)
        self.meter = attach_meter(self.engine)
        self.driver = Driver(self.engine)
        self.driver.start(own_thread=False)
        self.port = self.driver.open(self.take)

    def clock(self) -> float:
        return self.now

    def take(self, events: list[Event]) -> None:
        if any(isinstance(event, Progress) for event in events):  # admissions are told while a step runs
            self.now += DELIVERY_S

    def ask(self, count: int, **fields: object) -> None:
        self.port.send(Submit(request(self.port.request_id(count), sampling=GREEDY, **fields)))

    def turn(self) -> None:
        self.driver.turn()

    def run(self) -> None:
        self.turn()
        while not self.engine.is_idle:
            self.turn()

    def values(self) -> dict[str, float]:
        page = Exposition()
        stats = read_stats(self.engine, self.meter)
        stats.counters["restarts"] = 0
        write_engines(page, {0: stats})
        lines = [line for line in page.text().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def steps(self, what: str) -> dict[str, float]:
        values = self.values()
        return {method: values[f'tgi_batch_inference_{what}{{method="{method}"}}'] for method in ("prefill", "decode")}


def at_step(number: int) -> Fault:
    def fault(plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        if plan.step == number:
            raise RuntimeError("a device fault")

    return fault


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize(
    ("where", "step", "grammar", "failed"),
    [
        ("before_submit", 1, None, {"prefill": 1, "decode": 0}),
        ("before_submit", 3, None, {"prefill": 0, "decode": 1}),
        ("before_sample", 1, toy(2), {"prefill": 1, "decode": 0}),
        ("before_sample", 2, toy(2), {"prefill": 0, "decode": 1}),
    ],
)
def test_a_step_that_is_not_launched_or_not_sampled_counts_as_one_that_failed(lookahead, where, step, grammar, failed):
    engine = Engine(lookahead, {where: at_step(step)})
    engine.ask(1, max_tokens=6, grammar=grammar, end_ids=(END,))
    engine.run()
    assert engine.steps("failure") == failed
    assert sum(engine.steps("count").values()) == len(engine.executor.plans)
    successes, counts = engine.steps("success"), engine.steps("count")
    assert {method: counts[method] - successes[method] for method in counts} == failed


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_steps_discarded_behind_one_that_failed_count_as_failed(lookahead):
    engine = Engine(lookahead, {"before_result": at_step(2)})
    engine.ask(1, max_tokens=12)
    engine.run()
    assert engine.steps("failure") == {"prefill": 0, "decode": 1 + lookahead}
    assert sum(engine.steps("count").values()) == len(engine.executor.plans)
    assert sum(engine.steps("success").values()) == len(engine.executor.plans) - 1 - lookahead


def test_steps_under_way_are_counted_as_begun_alone():
    engine = Engine(lookahead=1)
    engine.ask(1, max_tokens=12)
    engine.turn()
    assert sum(engine.steps("count").values()) == 2
    assert sum(engine.steps("success").values()) == 1
    assert sum(engine.steps("failure").values()) == 0


def test_forward_is_the_share_of_the_device_and_inference_the_whole_of_a_step():
    engine = Engine(lookahead=0)
    engine.ask(1, max_tokens=5)
    engine.run()
    values = engine.values()
    for method, count in (("prefill", 1), ("decode", 4)):
        assert values[f'tgi_batch_forward_duration_count{{method="{method}"}}'] == count
        assert values[f'tgi_batch_forward_duration_sum{{method="{method}"}}'] == count * STEP_S
        assert values[f'tgi_batch_inference_duration_count{{method="{method}"}}'] == count
        assert values[f'tgi_batch_inference_duration_sum{{method="{method}"}}'] == count * (STEP_S + DELIVERY_S)


def test_a_step_launched_ahead_is_timed_from_its_launch():
    engine = Engine(lookahead=1)
    engine.ask(1, max_tokens=3)
    engine.run()
    values = engine.values()
    assert values['tgi_batch_forward_duration_sum{method="decode"}'] == 2 * (STEP_S + DELIVERY_S)
    assert values['tgi_batch_inference_duration_sum{method="decode"}'] > 2 * (STEP_S + DELIVERY_S)


def test_the_tokens_of_a_batch_are_those_that_its_sequences_may_ever_have():
    engine = Engine()
    engine.ask(1, prompt=(1, 2, 3), max_tokens=20)
    engine.ask(2, prompt=(4, 5, 6, 7), max_tokens=10)
    engine.turn()
    assert engine.values()["tgi_batch_current_max_tokens"] == 3 + 20 + 4 + 10
    engine.run()
    assert engine.values()["tgi_batch_current_max_tokens"] == 0


def test_the_slots_that_run_are_shown_beside_those_there_are():
    engine = Engine(max_batch_size=3)
    for number in range(1, 6):
        engine.ask(number, prompt=(number, 2, 3), max_tokens=20)
    for _ in range(3):
        engine.turn()
    values = engine.values()
    assert (values["quire_slots_running"], values["quire_slots_max"], values["tgi_queue_size"]) == (3, 3, 2)
    engine.run()
    values = engine.values()
    assert (values["quire_slots_running"], values["quire_slots_max"]) == (0, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "chunking"),
        ({"waiting_served_ratio": 1.0, "max_waiting_tokens": 3}, "backpressure"),
        ({"waiting_served_ratio": 4.0, "max_waiting_tokens": 3}, "wait_exceeded"),
    ],
)
def test_sequences_that_join_others_are_counted_by_the_rule_that_let_them(changes, reason):
    engine = Engine(**changes)
    engine.ask(1, max_tokens=30)
    engine.turn()
    engine.ask(2, prompt=(7, 8, 9), max_tokens=3)
    engine.run()
    values = engine.values()
    counted = {
        name: values[f'tgi_batch_concat{{reason="{name}"}}'] for name in ("backpressure", "wait_exceeded", "chunking")
    }
    assert counted == {name: float(name == reason) for name in counted}


def test_the_executors_padding_is_counted():
    engine = Engine()
    engine.executor.num_padding_tokens = 7
    assert engine.values()["quire_step_padding_tokens_total"] == 7


@pytest.mark.parametrize("max_guesses", [0, 3])
def test_guesses_are_counted_by_the_engine(max_guesses):
    engine = Engine(max_guesses=max_guesses)
    engine.ask(1, max_tokens=50)
    engine.run()
    values, counters = engine.values(), engine.engine.scheduler.counters
    assert values["quire_guesses"] == counters.guesses
    assert values["quire_right_guesses"] == counters.right_guesses
    if not max_guesses:
        assert values["quire_guess_acceptance"] == values["quire_guess_tokens_per_step"] == counters.guesses == 0
        return
    assert values["quire_guess_acceptance"] == counters.right_guesses / counters.guesses > 0
    assert values["quire_guess_tokens_per_step"] == 1 + counters.right_guesses / counters.guessed_chunks
    assert counters.steps <= 51 - counters.right_guesses + 2  # those planned before the end was known


def test_pages_are_counted_by_the_direction_in_which_they_went():
    engine = Engine(num_pages=8, page_size=4, host_pages=20, host_page_bytes=100, max_sequence_tokens=28)
    for request_id, first in enumerate((1, 25, 1)):
        engine.ask(request_id, prompt=tuple(range(first, first + 24)), max_tokens=3)
        engine.run()
    values, stats = engine.values(), engine.engine.scheduler.stats()
    assert values['quire_host_copied_pages{direction="to_host"}'] == stats.saved_pages > 5
    assert values['quire_host_copied_pages{direction="from_host"}'] == stats.restored_pages == 5
    assert values['quire_host_copied_bytes{direction="to_host"}'] == 100 * stats.saved_pages
    assert values['quire_host_copied_bytes{direction="from_host"}'] == 500
    assert values["quire_pages_on_host"] == stats.host_pages > 5
    assert values["quire_host_lost_pages"] == 0


def test_every_number_of_an_engine_is_summed_or_known_not_to_be():
    known = {
        "busy_s",
        "waited_s",
        "idle_s",
        "error",
        "step_limit_s",
        "is_compiling",
        "checking_s",
        "page_size",
        "is_searching",
    }
    assert set(Stats.__struct_fields__) == known | set(SUMMED) | set(JOINED)


def test_a_server_without_adapters_has_no_gauge_of_them():
    engine, page = Engine(), Exposition()
    write_endpoint(page, read_stats(engine.engine, engine.meter), "model")
    assert "vllm:num_requests_running" in page.text().decode()
    assert "lora" not in page.text().decode()


def test_reports_of_several_engines_become_one():
    one, other = Engine(), Engine()
    one.ask(1, prompt=(1, 2, 3), max_tokens=5)
    one.run()
    reports = [read_stats(engine.engine, engine.meter) for engine in (one, other)]
    for report in reports:
        report.counters["restarts"] = 0  # which its process knows
    reports = [
        msgspec.structs.replace(report, max_adapters=2, running_adapters=names)
        for report, names in zip(reports, (["b", "a"], ["c", "b"]), strict=True)
    ]
    both = sum_stats(reports)
    assert (both.max_adapters, both.running_adapters, both.waiting_adapters) == (4, ["a", "b", "c"], [])
    assert both.num_pages == 2 * reports[0].num_pages
    assert both.counters == {key: value + reports[1].counters[key] for key, value in reports[0].counters.items()}
    assert sum(both.steps["decode"]) == sum(reports[0].steps["decode"]) > 0
    assert both.idle_s == min(report.idle_s for report in reports)
    page = Exposition()
    write_engines(page, dict(enumerate(reports)), is_labelled=True)
    lines = page.text().decode().splitlines()
    assert len([line for line in lines if line.startswith("tgi_queue_size{engine=")]) == 2
    assert 'tgi_batch_inference_count{engine="1",method="decode"} 0' in lines
    assert len(lines) == len(set(lines))
