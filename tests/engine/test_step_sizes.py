"""Prompts are cut for the programs that there are."""

from quire.core.limits import Limits
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.step_sizes import StepSizes
from quire.request import Request
from tests.fake_executor import FakeExecutor


def test_prompts_are_cut_for_the_sizes_that_there_were_when_the_last_step_ended() -> None:
    limits = Limits(4, 400, 4, 1028, 1024, 1024)
    scheduler = Scheduler(limits, lambda: 0.0)
    engine = Engine(scheduler, FakeExecutor(400, 4, 4), lookahead=0)
    there: tuple[int, ...] = (256, 1024)
    engine.observe(StepSizes(scheduler, lambda: there))
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
