"""Keeps copies from the host within the time of the steps that they run beside."""

from quire.core.plan import Kind, Tier
from quire.core.scheduler import Scheduler
from quire.engine.observer import Observer, Step

FIRST_PAGES = 16  # of a step, before any copy has been measured
GROWTH = 1 / 32  # of the limit, by a step whose copies were there when it had computed; at least a page
FIRST_GROWTH = 1.0  # before a step has waited for its copies
SLACK = 0.02  # of a step's time, for which its result may wait for copies


class RestorePace(Observer):
    """While sequences decode, a step copies as many pages from the host as come in its time.

    For devices that copy beside their computation: pages cost others nothing as long as they come before the step has
    computed. What a step takes besides, since it copies at all, is no less if it copies fewer pages, and more steps
    would have it. So `RestoreLimit` is not for these. Owned by the engine thread.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._budget = scheduler.budget
        self._most = scheduler.limits.max_page_restores
        self._growth = FIRST_GROWTH
        self._allow(FIRST_PAGES)

    def step_ended(self, step: Step) -> None:
        plan = step.plan
        num_restored = sum(copy.source.tier is Tier.HOST for copy in plan.copies)
        if not num_restored or not plan.chunks or step.error is not None or step.waited_for_compiler:
            return
        if plan.burst > 1 or any(chunk.kind is not Kind.DECODE for chunk in plan.chunks):
            return
        if step.copies_waited_s > SLACK * step.took_s:
            self._growth = GROWTH
            self._allow(int(num_restored * (1 - step.copies_waited_s / step.took_s)))
        elif num_restored >= self._limit:
            self._allow(self._limit + max(1, int(self._growth * self._limit)))

    def _allow(self, num_pages: int) -> None:
        self._limit = self._budget.max_restores_beside_decodes = max(1, min(num_pages, self._most))
