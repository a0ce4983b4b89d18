"""How long steps take, and what may be done in one for it."""

from collections import deque
from collections.abc import Callable

from quire.core.plan import Kind, StepPlan
from quire.core.scheduler import Scheduler

SHARE_OF_LAST = 0.25  # of the newest step in the mean


class BurstLimit:
    """Lets the scheduler plan bursts for as long as they end in time, by the decodes there were.

    Whoever arrives meanwhile waits for the bursts under way, and those who read along get their tokens together.
    Owned by the engine thread.
    """

    def __init__(self, scheduler: Scheduler, longest_s: float, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._longest_s = longest_s
        self._clock = clock
        self._begun_s: deque[float] = deque()  # of the steps under way, oldest first
        self._last_end_s = 0.0
        self._token_s: float | None = None  # what one token of every row takes

    def launched(self) -> None:
        self._begun_s.append(self._clock())

    def ended(self, plan: StepPlan) -> None:
        """The oldest step under way has."""
        now = self._clock()
        took_s = now - max(self._begun_s.popleft(), self._last_end_s)
        self._last_end_s = now
        if plan.chunks[-1].kind is Kind.PREFILL:
            return  # not of decodes alone
        token_s = took_s / plan.burst
        self._token_s = token_s if self._token_s is None else self._token_s + SHARE_OF_LAST * (token_s - self._token_s)
        most = self._scheduler.limits.max_burst
        self._scheduler.burst = most if most * self._token_s <= self._longest_s else 1

    def forget(self) -> None:
        """Nothing is under way any more."""
        self._begun_s.clear()
