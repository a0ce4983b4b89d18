"""Upkeep of an idle engine."""

import logging

from quire.engine.engine import Engine

log = logging.getLogger(__name__)


class IdleUpkeep:
    """Audits pages while the engine is idle: briefly at once, thoroughly after `audit_after_s`. Checks the device every
    `check_every_s` without a step, since nothing else would find out that it is dead. Goes on with the `idle_work` of
    the engine, which ends if the device fails in it.

    Owned by the engine thread.
    """

    def __init__(self, engine: Engine, audit_after_s: float, check_every_s: float) -> None:
        self._engine = engine
        self._clock = engine.clock
        self._audit_after_s = audit_after_s
        self._check_every_s = check_every_s
        self._check_s = 0.0  # time of the next check of the device
        self._num_steps = -1  # at the last time that the engine was idle
        self._audits: list[tuple[float, bool]] = []  # time, and whether thorough

    def begin(self) -> None:
        """The engine becomes idle."""
        now = self._clock()
        self._audits = [(now, False), (now + self._audit_after_s, True)]
        num_steps = self._engine.scheduler.stats().steps
        if num_steps != self._num_steps:  # else it was woken without a use of the device
            self._num_steps = num_steps
            self._check_s = now + self._check_every_s

    def run(self) -> float | None:
        """Do what is due. Returns the seconds until the next task; None if the engine cannot run any more."""
        if self._engine.error is not None:
            return None
        while self._audits and self._audits[0][0] <= self._clock():
            self._audit(self._audits.pop(0)[1])
        if self._check_s <= self._clock():
            self._engine.check_device()
            self._check_s = self._clock() + self._check_every_s
        working_s = self._clock() + wait_s if (wait_s := self._work()) is not None else float("inf")
        next_s = min([self._check_s, working_s, *(at_s for at_s, _ in self._audits)])
        return max(0.0, next_s - self._clock())

    def _work(self) -> float | None:
        """Returns the seconds after which there is more of it."""
        engine = self._engine
        work, engine.idle_work = engine.idle_work, None
        if work is None:
            return None
        waits_s: list[float | None] = [None]
        engine.check_device(lambda: waits_s.append(work()))
        if waits_s[-1] is not None:
            engine.idle_work = work
        return waits_s[-1]

    def _audit(self, thorough: bool) -> None:
        try:
            self._engine.audit(thorough)
        except Exception:  # an audit must not break a working engine
            log.exception("the audit of pages failed")
