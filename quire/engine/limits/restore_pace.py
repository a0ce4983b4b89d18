"""Keeps copies from the host within the time of the steps that they run beside."""

from quire.core.plan import Tier
from quire.core.scheduler import Scheduler
from quire.engine.observer import DECODE, Observer, Step

FIRST_PAGES = 16  # of a step, before any copy has been measured
FIRST_GROWTH, GROWTH = 1.0, 1 / 64  # of the pages of a step that had them in time, before one had to wait and after it
BLOCK = 16  # pages that travel together: a step copies whole blocks, if it copies so many
LAST_SHARE = 0.25  # of the newest measurement in a mean
# A step that copied a smaller share of the pages allowed says little of their pace: some may be late for reasons of
# their own. No step lowers the pace by more.
LEAST_SHARE = 0.5
ROUNDING = 1e-9  # so that a half of 192 is 96
SLACK = 0.02  # of a step's time, for which its result may wait for copies
# By so much a step that waited for no copies may be slower than others: the host plans and begins them, which takes it
# time for each page. One that is slower has too many, if they are more than a few: what a step takes besides, since it
# copies at all, is no less if it copies fewer, and more steps would have it.
SLOWER = 0.05
FEW_PAGES = 48


class RestorePace(Observer):
    """While sequences decode, a step copies as many pages from the host as come in its time.

    For devices that copy beside their computation: pages cost others nothing as long as they come before the step has
    computed, and the host has time to begin them. So `RestoreLimit` is not for these. Owned by the engine thread.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._budget = scheduler.budget
        self._most = scheduler.limits.max_page_restores
        self._row = len(scheduler.limits.page_groups)  # pages that are copied together, or fewer
        self._page_s: float | None = None  # time of a copy, or less
        self._step_s: float | None = None  # time of a step, mean
        self._growth = FIRST_GROWTH
        self._allow(FIRST_PAGES)

    def step_ended(self, step: Step) -> None:
        plan = step.plan
        if step.error is not None or step.waited_for_compiler or step.kind != DECODE or plan.burst > 1:
            return
        num_restored = sum(copy.source.tier is Tier.HOST for copy in plan.copies) if plan.copies else 0
        has_waited = step.copies_waited_s > SLACK * step.took_s
        is_slow = self._step_s is not None and step.took_s > (1 + SLOWER) * self._step_s
        if num_restored and (has_waited or (is_slow and num_restored > FEW_PAGES)):
            if num_restored >= LEAST_SHARE * self._allowed:
                self._growth = GROWTH
                self._step_s = self._step_s or step.took_s - step.copies_waited_s
                least = LEAST_SHARE * self._allowed
                if not has_waited:
                    least = max(least, FEW_PAGES)
                self._page_s = min(step.took_s / num_restored, self._step_s / least)
        else:
            if not num_restored or not is_slow:
                before = self._step_s
                self._step_s = step.took_s if before is None else before + LAST_SHARE * (step.took_s - before)
            assert self._step_s is not None
            is_full = num_restored > 0 and num_restored > self._allowed - self._row
            if is_full and (not is_slow or num_restored < FEW_PAGES):
                page_s = self._step_s / num_restored if self._page_s is None else self._page_s
                self._page_s = page_s / (1 + self._growth)
        if self._page_s and self._step_s:
            self._allow(int(self._step_s / self._page_s + ROUNDING))

    def _allow(self, num_pages: int) -> None:
        num_pages = max(1, min(num_pages, self._most))
        self._allowed = num_pages - num_pages % BLOCK if num_pages > BLOCK else num_pages
        self._budget.max_restores_beside_decodes = self._allowed
