"""Prompts are cut for the programs that there are."""

from types import SimpleNamespace
from typing import Any

from quire.core.limits import Limits
from quire.core.scheduler import Scheduler
from quire.engine.building.build import Built
from quire.engine.engine import Engine
from quire.request import Request
from tests.fake_executor import FakeExecutor


def test_prompts_are_cut_for_the_sizes_that_there_were_when_the_last_step_ended() -> None:
    limits = Limits(4, 400, 4, 1028, 1024, 1024)
    scheduler = Scheduler(limits, lambda: 0.0)
    engine = Engine(scheduler, FakeExecutor(400, 4, 4), lookahead=0)
    there: tuple[int, ...] = (256, 1024)
    engine.step_limits.step_sizes = lambda: there
    steps = []
    for number in range(4):
        engine.add(Request(number, (number, *range(10, 40)) * 10, max_tokens=1))  # 310 tokens
        before = scheduler.counters.steps
        while not engine.is_idle:
            engine.step()
        steps.append(scheduler.counters.steps - before)
        if number == 1:
            there = (256, 320, 1024)
    assert steps == [1, 2, 2, 1]


def test_a_server_that_begins_early_cuts_prompts_for_the_programs_there_are() -> None:
    limits = Limits(4, 400, 4, 1028, 1024, 1024)
    scheduler = Scheduler(limits, lambda: 0.0)
    engine = Engine(scheduler, FakeExecutor(400, 4, 4), lookahead=0)
    programs: Any = SimpleNamespace(step_sizes=(256,))
    executor: Any = SimpleNamespace(programs=programs, warm_up=lambda: iter([0.5, 1.0]), warm_up_more=lambda: None)
    deployment: Any = None
    begun = Built(deployment, engine, executor).warm_up()
    assert next(begun) == 0.5  # and serves from here on
    engine.add(Request(1, (1, 2, 3), max_tokens=1))
    while not engine.is_idle:
        engine.step()
    assert scheduler.budget.step_sizes == (256,)
    programs.step_sizes = (256, 512)
    assert engine.idle_work is not None
    engine.idle_work()
    assert scheduler.budget.step_sizes == (256, 512)
    programs.step_sizes = (1024,)
    assert list(begun) == [1.0]
    assert scheduler.budget.step_sizes == (1024,)
    assert engine.idle_work is None
