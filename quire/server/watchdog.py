"""Ends an engine that is stuck."""

import asyncio
import logging
import time

from quire.engine.leash import Pulse
from quire.server.child import Child

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
UNMEASURED_S = 600.0  # for a step of which nothing is known, and for one that waits for the compiler


class Watchdog:
    """Kills an engine process that has work and ends no step, or that says nothing.

    After `floor_s`, or after what steps may take by those before them where that is longer; never where it is 0. Owned
    by the supervisor's loop.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._last_limit_s = UNMEASURED_S

    async def watch(self, engine: Child) -> None:
        """Until cancelled."""
        await engine.up.wait()
        looked_s = time.monotonic()
        while self._floor_s:
            now = time.monotonic()
            if now - looked_s > 4 * INTERVAL_S:
                engine.heard_s = now  # this process stood still itself, so that nothing is known
            looked_s = now
            why = self.trouble(engine.pulse, now - engine.heard_s)
            if why is not None:
                log.error("%s; the engine is killed", why)
                engine.kill()
            await asyncio.sleep(INTERVAL_S)

    def trouble(self, pulse: Pulse | None, silent_s: float) -> str | None:
        """Why an engine is to be ended that last said this, `silent_s` ago."""
        if silent_s > self._floor_s:
            return f"the engine has not been heard of for {silent_s:.1f} s"
        if pulse is None:
            return None
        waited_s, limit_s = pulse.waited_s, max(self._floor_s, self._limit_s(pulse))
        return f"no step has ended for {waited_s:.1f} s, {limit_s:.1f} s are allowed" if waited_s > limit_s else None

    def _limit_s(self, pulse: Pulse) -> float:
        """By the steps of this engine, or of one that was in its place."""
        if pulse.limit_s is not None:
            self._last_limit_s = pulse.limit_s
        return UNMEASURED_S if pulse.is_compiling else self._last_limit_s
