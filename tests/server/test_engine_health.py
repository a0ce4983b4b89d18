"""Stuck engines, and engines that are only slow."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.meter import attach_meter, read_stats
from quire.ipc.messages import Stats
from quire.server.observe.engine_health import MAX_CHECK_S, MAX_SILENCE_S, UNMEASURED_S, EngineHealth
from tests.core.harness import limits
from tests.fake_executor import FakeExecutor


def stats(**changes: object) -> Stats:
    """Of an engine that has run, with changes."""
    chosen = limits()
    executor = FakeExecutor(chosen.num_pages, chosen.page_size, chosen.max_batch_size, None, None)
    engine = Engine(Scheduler(chosen, lambda: 0.0), executor)
    plain = read_stats(engine, attach_meter(engine))
    return msgspec.structs.replace(plain, **({"step_limit_s": 0.3} | changes))


class Listening:
    """Health that hears of the engine four times a second."""

    def __init__(self, floor_s: float = 1.5) -> None:
        self.health = EngineHealth(floor_s)
        self.now = 1000.0
        self.idle_until_s = 1000.0

    def on_stats(self, seconds: float, ended_s: float | None = None, **changes: object) -> str | None:
        """For so long. `ended_s`: when the last step ended; None when steps end all the time."""
        until = self.now + seconds
        problem = None
        while self.now < until:
            self.now += 0.25
            has_work = any(changes.get(name) for name in ("num_running", "num_waiting"))
            self.idle_until_s = self.idle_until_s if has_work else self.now
            waited_s = 0.01 if ended_s is None else self.now - max(ended_s, self.idle_until_s)
            self.health.on_stats(stats(waited_s=waited_s if has_work else 0.0, **changes), self.now)
            problem = self.health.problem(self.now + 0.2)
        return problem


def test_an_engine_that_stops_in_the_middle_is_stuck_within_two_seconds():
    engine = Listening()
    assert engine.on_stats(5, num_running=3) is None
    stopped_s = engine.now
    assert engine.on_stats(1, stopped_s, num_running=3, busy_s=1.0) is None
    assert "the engine is stuck: 3 sequences run" in engine.on_stats(0.8, stopped_s, num_running=3, busy_s=1.8)
    assert engine.now - stopped_s <= 2
    assert engine.on_stats(0.25, num_running=3) is None  # it goes on


def test_an_engine_that_does_not_begin_with_what_waits_is_stuck():
    engine = Listening()
    engine.on_stats(2, 900.0)
    assert "1 wait, and no step has ended" in engine.on_stats(2, 900.0, num_waiting=1)
    assert "no step is under way" in engine.on_stats(0.25, 900.0, num_waiting=1)


def test_an_engine_without_work_is_fine_however_long():
    engine = Listening()
    assert engine.on_stats(30, 900.0) is None


def test_steps_that_take_long_by_nature_are_not_stuck():
    engine = Listening()
    engine.on_stats(1, num_running=1)
    begun_s = engine.now
    slow = {"num_running": 1, "step_limit_s": 20.0}
    assert engine.on_stats(19, begun_s, **slow) is None
    assert "20.0 s are allowed" in engine.on_stats(2, begun_s, **slow)


@pytest.mark.parametrize("first", [{"step_limit_s": None}, {"is_compiling": True}])
def test_the_first_step_and_one_that_is_compiled_have_minutes(first):
    engine = Listening()
    begun_s = engine.now
    assert engine.on_stats(UNMEASURED_S - 1, begun_s, num_running=1, **first) is None
    assert engine.on_stats(2, begun_s, num_running=1, **first) is not None


def test_an_engine_that_takes_anothers_place_is_measured_by_it():
    engine = Listening()
    engine.on_stats(1, num_running=1, step_limit_s=4.0)
    engine.health.forget()
    begun_s = engine.now
    assert engine.on_stats(3.5, begun_s, num_running=1, step_limit_s=None) is None
    assert "4.0 s are allowed" in engine.on_stats(1, begun_s, num_running=1, step_limit_s=None)


def test_an_engine_that_says_nothing_or_gave_up_is_in_trouble():
    engine = Listening()
    assert engine.health.problem(engine.now) is None
    engine.on_stats(1)
    assert "has not been heard of" in engine.health.problem(engine.now + MAX_SILENCE_S + 0.1)
    assert engine.on_stats(1, error="the device is gone") == "the device is gone"
    engine.health.forget()
    assert engine.health.problem(engine.now) is None


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_a_device_that_does_not_answer_its_check_is_trouble(num_waiting):
    engine = Listening()
    waiting = {"num_waiting": num_waiting, "step_limit_s": None}
    assert engine.on_stats(1, 900.0, checking_s=MAX_CHECK_S - 1, **waiting) is None
    problem = engine.on_stats(1, 900.0, checking_s=MAX_CHECK_S + 1, **waiting)
    assert problem is not None
    assert "the device has not answered for" in problem
    assert engine.on_stats(0.25, 900.0, checking_s=None, **waiting) is None


@given(st.lists(st.floats(0.01, 1.2), min_size=1, max_size=60), st.integers(1, 5))
def test_an_engine_whose_steps_end_in_time_is_never_stuck(gaps, running):
    engine = Listening()
    ended_s = engine.now
    for gap in gaps:
        assert engine.on_stats(gap, ended_s, num_running=running) is None
        ended_s = engine.now - 0.01
