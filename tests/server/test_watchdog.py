"""How long a step may take before its engine is ended, and how long a process may say nothing."""

from quire.engine.leash import Pulse
from quire.server.watchdog import Silence, StuckEngine


def test_a_step_has_the_floor_and_what_steps_before_it_allow():
    is_stuck = StuckEngine(30)
    assert is_stuck(Pulse(29.0, 1.0, False), 0.1) is None
    assert is_stuck(Pulse(31.0, 1.0, False), 0.1) == "no step has ended for 31.0 s, 30.0 s are allowed"
    assert is_stuck(Pulse(31.0, 40.0, False), 0.1) is None
    assert is_stuck(Pulse(41.0, 40.0, False), 0.1) is not None


def test_the_first_step_and_one_that_is_compiled_have_minutes():
    assert StuckEngine(30)(Pulse(500.0, None, False), 0.1) is None
    assert StuckEngine(30)(Pulse(601.0, None, False), 0.1) is not None
    assert StuckEngine(30)(Pulse(500.0, 1.0, True), 0.1) is None


def test_the_next_engine_is_held_to_what_the_last_one_measured():
    is_stuck = StuckEngine(30)
    assert is_stuck(Pulse(0.0, 1.0, False), 0.1) is None
    assert is_stuck(Pulse(31.0, None, False), 0.1) is not None


def test_silence_has_the_floor():
    assert StuckEngine(30)(None, 29.0) is None
    assert StuckEngine(30)(None, 31.0) == "the engine has not been heard of for 31.0 s"
    assert Silence("quire-http-1", 30)(None, 31.0) == "quire-http-1 has not been heard of for 31.0 s"


def test_nothing_is_ended_where_the_limit_is_0():
    assert StuckEngine(0)(Pulse(1e6, 1.0, False), 1e6) is None
    assert Silence("quire-http-1", 0)(None, 1e6) is None
