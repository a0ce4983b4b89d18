"""How long a step may take before its engine is ended."""

from quire.engine.leash import Pulse
from quire.server.watchdog import Watchdog


def test_a_step_has_the_floor_and_what_steps_before_it_allow():
    watchdog = Watchdog(30)
    assert watchdog.trouble(Pulse(29.0, 1.0, False), 0.1) is None
    assert watchdog.trouble(Pulse(31.0, 1.0, False), 0.1) == "no step has ended for 31.0 s, 30.0 s are allowed"
    assert watchdog.trouble(Pulse(31.0, 40.0, False), 0.1) is None
    assert watchdog.trouble(Pulse(41.0, 40.0, False), 0.1) is not None


def test_the_first_step_and_one_that_is_compiled_have_minutes():
    assert Watchdog(30).trouble(Pulse(500.0, None, False), 0.1) is None
    assert Watchdog(30).trouble(Pulse(601.0, None, False), 0.1) is not None
    assert Watchdog(30).trouble(Pulse(500.0, 1.0, True), 0.1) is None


def test_the_next_engine_is_held_to_what_the_last_one_measured():
    watchdog = Watchdog(30)
    assert watchdog.trouble(Pulse(0.0, 1.0, False), 0.1) is None
    assert watchdog.trouble(Pulse(31.0, None, False), 0.1) is not None


def test_silence_has_the_floor():
    assert Watchdog(30).trouble(None, 29.0) is None
    assert Watchdog(30).trouble(None, 31.0) == "the engine has not been heard of for 31.0 s"
