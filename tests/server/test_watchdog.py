"""Limits of the time of a step, and of the silence of a process."""

import asyncio
import socket
import time

from quire.ipc.supervisor_link import Heartbeat
from quire.ipc.watchdog_timeout import STUCK_FACTOR, LongestStep
from quire.server.processes.child import Child
from quire.server.processes.watchdog import INTERVAL_S, Silence, StuckEngine, counted_from, watching
from tests.patience import WAIT_S


def heartbeat(
    waited_s: float, longest_s: float = 0.1, most_tokens: int = 8, *, num_tokens: int = 8,
    is_compiling: bool = False, is_searching: bool = False, is_checking: bool = False,
) -> Heartbeat:  # fmt: skip
    return Heartbeat(waited_s, LongestStep(longest_s, most_tokens), num_tokens, is_compiling, is_searching, is_checking)


def test_a_step_has_the_floor_and_what_steps_before_it_allow():
    is_stuck = StuckEngine(30)
    assert is_stuck(heartbeat(29.0), 0.1) is None
    assert is_stuck(heartbeat(31.0), 0.1) == "no step has ended for 31.0 s, 30.0 s are allowed"
    assert is_stuck(heartbeat(31.0, 40 / STUCK_FACTOR), 0.1) is None
    assert is_stuck(heartbeat(41.0, 40 / STUCK_FACTOR), 0.1) is not None
    assert is_stuck(heartbeat(79.0, 40 / STUCK_FACTOR, num_tokens=16), 0.1) is None
    assert is_stuck(heartbeat(81.0, 40 / STUCK_FACTOR, num_tokens=16), 0.1) is not None


def test_the_first_step_and_one_that_is_compiled_have_minutes():
    assert StuckEngine(30)(heartbeat(500.0, 0.0, 0), 0.1) is None
    assert StuckEngine(30)(heartbeat(601.0, 0.0, 0), 0.1) is not None
    assert StuckEngine(30)(heartbeat(500.0, is_compiling=True), 0.1) is None


def test_the_next_engine_is_held_to_what_the_last_one_measured():
    is_stuck = StuckEngine(30)
    assert is_stuck(heartbeat(0.0, 1.0, most_tokens=64), 0.1) is None
    assert is_stuck(heartbeat(31.0, 0.0, 0, num_tokens=64), 0.1) is not None
    # It has worked off one small step so far, by which a large one might take minutes.
    assert is_stuck(heartbeat(31.0, 0.5, most_tokens=1, num_tokens=64), 0.1) is not None


def test_while_a_culprit_is_looked_for_its_steps_have_less_time():
    assert StuckEngine(30)(heartbeat(6.0, is_searching=True), 0.1) == "no step has ended for 6.0 s, 5.0 s are allowed"
    assert StuckEngine(2)(heartbeat(3.0, is_searching=True), 0.1) is not None
    assert StuckEngine(30)(heartbeat(6.0, 1.0, is_searching=True), 0.1) is None
    assert StuckEngine(30)(heartbeat(6.0, is_searching=True, is_compiling=True), 0.1) is None


def test_a_check_of_the_device_has_the_floor_alone():
    assert StuckEngine(30)(heartbeat(29.0, 0.0, 0, is_checking=True), 0.1) is None
    why = "the device has not answered for 31.0 s, 30.0 s are allowed"
    assert StuckEngine(30)(heartbeat(31.0, 0.0, 0, is_checking=True), 0.1) == why
    assert StuckEngine(0)(heartbeat(31.0, 0.0, 0, is_checking=True), 0.1) is None


def test_silence_has_the_floor():
    assert StuckEngine(30)(None, 29.0) is None
    assert StuckEngine(30)(None, 31.0) == "the engine has not been heard of for 31.0 s"
    assert StuckEngine(30)(heartbeat(0.0, is_searching=True), 29.0) is None
    assert StuckEngine(30)(heartbeat(0.0), 31.0) == "the engine has not been heard of for 31.0 s"
    assert Silence("quire-http-1", 30)(None, 31.0) == "quire-http-1 has not been heard of for 31.0 s"


def test_silence_counts_without_the_time_in_which_the_watch_was_suspended_itself():
    assert counted_from(heard_s=100.0, looked_s=110.0, now=110.0 + INTERVAL_S) == 100.0
    assert counted_from(heard_s=100.0, looked_s=110.0, now=170.0 + INTERVAL_S) == 160.0
    assert counted_from(heard_s=170.0, looked_s=110.0, now=170.0 + INTERVAL_S) == 170.0 + INTERVAL_S, "it was just read"


def test_a_stuck_process_is_found_by_a_watch_that_is_often_late():
    """A second and a half, every few seconds, as on a machine with too much to do."""
    heard_s, looked_s, now, is_stuck = 0.0, 0.0, 0.0, Silence("it", 30)
    while is_stuck(None, now - heard_s) is None:
        now += 1.5 if int(now) % 4 == 0 else INTERVAL_S
        heard_s, looked_s = counted_from(heard_s, looked_s, now), now
        assert now < 90


def test_nothing_is_ended_where_the_limit_is_0():
    assert StuckEngine(0)(heartbeat(1e6), 1e6) is None
    assert Silence("quire-http-1", 0)(None, 1e6) is None


def say_nothing(line: socket.socket) -> None:
    time.sleep(3600)


def test_a_process_that_does_not_get_up_is_ended_unless_it_is_the_first():
    async def run(starting: Silence | None) -> str:
        child = await Child("quire-silent", say_nothing, lambda line: (line,)).connected()
        async with watching(child, Silence("it", 0.1), starting):
            done, _ = await asyncio.wait({asyncio.create_task(child.ended.wait())}, timeout=WAIT_S if starting else 1)
        assert bool(done) is (starting is not None)
        child.kill()
        await child.ended.wait()
        return child.exit_status

    assert asyncio.run(run(Silence("it", 0.5))) == "signal 9"
    asyncio.run(run(None))
