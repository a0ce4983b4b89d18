"""Ends processes that are stuck."""

import asyncio
import logging
import time
from collections.abc import Callable

from quire.ipc.supervisor_link import Heartbeat
from quire.ipc.watchdog_timeout import LongestStep
from quire.server.processes.child import Child

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
STARTING_FACTOR = 10  # a process that starts may be silent for so much longer: loading a model is not all in our hands
SEARCH_S = 5.0  # while it looks for a request that makes steps fail
UNMEASURED_S = 600.0  # for a step of which nothing is known, and for one that waits for the compiler

# Why a process is to be ended that last said this, so many seconds ago.
Trouble = Callable[[Heartbeat | None, float], str | None]


async def watch(child: Child, trouble: Trouble, starting: Trouble | None) -> None:
    """Kill a process when there is trouble with it, with `starting` before it is up. Until cancelled."""
    if starting is None:
        await child.up.wait()
    looked_s = time.monotonic()
    while True:
        now = time.monotonic()
        if now - looked_s > 4 * INTERVAL_S:  # this process stood still itself, so that nothing is known
            child.heard_s, child.heartbeat = now, None
        looked_s = now
        look = trouble if starting is None or child.up.is_set() else starting
        why = look(child.heartbeat, now - child.heard_s)
        if why is not None:
            log.error("%s; %s is killed", why, child.name)
            child.kill()
        await asyncio.sleep(INTERVAL_S)


class Silence:
    """The trouble with a process that says nothing for `limit_s`; none where that is 0."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s

    def __call__(self, heartbeat: Heartbeat | None, silent_s: float) -> str | None:
        if not 0 < self._limit_s < silent_s:
            return None
        return f"{self._name} has not been heard of for {silent_s:.1f} s"


class StuckEngine:
    """The trouble with an engine process that has work and ends no step, or that says nothing.

    After `floor_s`, or after what steps may take by those before them where that is longer; never where it is 0. While
    it looks for a request that makes steps fail, and may have to meet it several times, the floor is lower. Is the same
    for one engine after the other, and remembers what they took. Owned by the supervisor's loop.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._silence = Silence("the engine", floor_s)
        self._longest = LongestStep()

    def __call__(self, heartbeat: Heartbeat | None, silent_s: float) -> str | None:
        if not self._floor_s or heartbeat is None:
            return self._silence(heartbeat, silent_s)
        if heartbeat.longest.num_tokens >= self._longest.num_tokens:
            self._longest = heartbeat.longest  # else another engine knows more about large steps
        if heartbeat.is_checking and heartbeat.waited_s > self._floor_s:
            return f"the device has not answered for {heartbeat.waited_s:.1f} s, {self._floor_s:.1f} s are allowed"
        floor_s = min(self._floor_s, SEARCH_S) if heartbeat.is_searching else self._floor_s
        waited_s, limit_s = heartbeat.waited_s, max(floor_s, self._limit_s(heartbeat))
        if waited_s > limit_s:
            return f"no step has ended for {waited_s:.1f} s, {limit_s:.1f} s are allowed"
        return self._silence(heartbeat, silent_s)

    def _limit_s(self, heartbeat: Heartbeat) -> float:
        limit_s = self._longest.limit_s(heartbeat.num_tokens)
        return UNMEASURED_S if limit_s is None or heartbeat.is_compiling else limit_s
