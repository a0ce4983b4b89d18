"""Kills processes that are stuck."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.ipc.supervisor_link import Heartbeat
from quire.ipc.watchdog_timeout import LongestStep, timeout_s
from quire.server.processes.child import Child

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
STARTING_FACTOR = 10  # a starting process may be silent this many times as long: it loads a model
SEARCH_S = 5.0  # while the engine looks for a request that makes steps fail
UNMEASURED_S = 600.0

# The reason to kill a process, from its last heartbeat and the seconds since its last message; None to keep it.
StuckCheck = Callable[[Heartbeat | None, float], str | None]


@asynccontextmanager
async def watching(child: Child, check: StuckCheck, starting: StuckCheck | None) -> AsyncIterator[None]:
    """Kill a process when `check` finds it stuck; `starting` checks before it is up, None sets no limit then."""
    task = asyncio.create_task(_watch(child, check, starting))
    try:
        yield
    finally:
        task.cancel()


async def _watch(child: Child, check: StuckCheck, starting: StuckCheck | None) -> None:
    if starting is None:
        await child.up.wait()
    looked_s = time.monotonic()
    while True:
        now = time.monotonic()
        child.heard_s = counted_from(child.heard_s, looked_s, now)
        looked_s = now
        look = check if starting is None or child.up.is_set() else starting
        why = look(child.heartbeat, now - child.heard_s)
        if why is not None:
            log.error("%s; %s is killed", why, child.name)
            child.kill()
        await asyncio.sleep(INTERVAL_S)


def counted_from(heard_s: float, looked_s: float, now: float) -> float:
    """The time from which the silence of a process counts that was heard of at `heard_s`. It lacks the seconds in which
    this process, which has looked at `looked_s`, was suspended itself and read nothing; and no others, since on a
    machine with too much to do that happens again and again."""
    late_s = now - looked_s - INTERVAL_S
    return min(now, heard_s + late_s) if late_s > 3 * INTERVAL_S else heard_s


class Silence:
    """Finds a process stuck that sends nothing for `limit_s`; 0 is no limit."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s

    def __call__(self, heartbeat: Heartbeat | None, silent_s: float) -> str | None:
        if not 0 < self._limit_s < silent_s:
            return None
        return f"{self._name} has not been heard of for {silent_s:.1f} s"


class StuckEngine:
    """Finds an engine process stuck that has work and ends no step, or that sends nothing.

    `floor_s` is the least time that a step has; 0 is no limit. While the engine looks for a request that makes steps
    fail, and may meet it several times, the floor is lower. The next engine is held to what this one measured.
    Owned by the supervisor's loop.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._silence = Silence("the engine", floor_s)
        self._longest = LongestStep()

    def __call__(self, heartbeat: Heartbeat | None, silent_s: float) -> str | None:
        if not self._floor_s or heartbeat is None:
            return self._silence(heartbeat, silent_s)
        if heartbeat.longest.num_tokens >= self._longest.num_tokens:
            self._longest = heartbeat.longest  # otherwise an earlier engine measured larger steps
        waited_s = heartbeat.waited_s
        if heartbeat.is_checking and waited_s > self._floor_s:
            return f"the device has not answered for {waited_s:.1f} s, {self._floor_s:.1f} s are allowed"
        limit_s = timeout_s(
            self._longest.limit_s(heartbeat.num_tokens),
            is_compiling=heartbeat.is_compiling,
            floor_s=min(self._floor_s, SEARCH_S) if heartbeat.is_searching else self._floor_s,
            unmeasured_s=UNMEASURED_S,
        )
        if waited_s > limit_s:
            return f"no step has ended for {waited_s:.1f} s, {limit_s:.1f} s are allowed"
        return self._silence(heartbeat, silent_s)
