"""Limits the slowdown of other sequences by copies from the host."""

from quire.core.plan import Kind, StepPlan, Tier
from quire.core.scheduler import Scheduler
from quire.engine.observer import Observer, Step

MAX_SLOWDOWN = 0.05  # of a step in which sequences decode, by the pages it copies
LAST_SHARE = 0.25  # of the newest measurement in a mean
FIRST_LIMIT = 2  # pages, before any copy has been measured


class RestoreLimit(Observer):
    """While sequences decode, bounds the pages that a step copies from the host by the time that copies take.

    Steps of decodes only are compared, with and without copies. A page that comes from the host drives another out, so
    that it counts twice. Owned by the engine thread.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._budget = scheduler.budget
        self._most = scheduler.limits.max_page_restores
        self._alone_s: float | None = None  # time of a step without copies
        self._page_s: float | None = None  # time that one page adds
        self._budget.max_restores_beside_decodes = min(FIRST_LIMIT, self._most)

    def step_ended(self, step: Step) -> None:
        plan = step.plan
        if step.error is not None or step.waited_for_compiler or not plan.chunks or plan.burst > 1:
            return
        if any(chunk.kind is not Kind.DECODE for chunk in plan.chunks):
            return
        count = _num_copied(plan)
        if not count:
            self._alone_s = _mean(self._alone_s, step.took_s)
        elif self._alone_s is not None:
            self._page_s = _mean(self._page_s, max(0.0, step.took_s - self._alone_s) / count)
            allowed_s = MAX_SLOWDOWN * self._alone_s
            pages = allowed_s / (2 * self._page_s) if self._page_s * 2 * self._most > allowed_s else self._most
            self._budget.max_restores_beside_decodes = max(1, int(pages))


def _num_copied(plan: StepPlan) -> int:
    return sum(Tier.HOST in (copy.source.tier, copy.target.tier) for copy in plan.copies)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + LAST_SHARE * (newest - before)
