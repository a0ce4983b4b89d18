"""Disables bursts that would exceed `max_burst_ms`."""

from quire.core.scheduler import Scheduler
from quire.engine.observer import DECODE, Observer, Step

SHARE_OF_LAST = 0.25  # of the newest step in the mean


class BurstLimit(Observer):
    """Lets the scheduler plan bursts while they end within `max_burst_s`, by the time of recent decode steps.

    A new request waits for the bursts under way, and readers of a stream get the tokens of a burst together. Owned by
    the engine thread.
    """

    def __init__(self, scheduler: Scheduler, max_burst_s: float) -> None:
        self._scheduler = scheduler
        self._max_burst_s = max_burst_s
        self._token_s: float | None = None  # time for one token of every row

    def step_ended(self, step: Step) -> None:
        if step.error is not None or step.kind is not DECODE:
            return
        token_s = step.took_s / step.plan.burst
        self._token_s = token_s if self._token_s is None else self._token_s + SHARE_OF_LAST * (token_s - self._token_s)
        most = self._scheduler.limits.max_burst
        self._scheduler.budget.burst = most if most * self._token_s <= self._max_burst_s else 1
