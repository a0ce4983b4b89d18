"""Limits the slowdown of other sequences by copies from the host."""

from math import ceil

from quire.core.plan import StepPlan, Tier
from quire.core.scheduler import Scheduler
from quire.engine.observer import Observer, Step

MAX_SLOWDOWN = 0.05  # of a step in which sequences decode, by the pages it copies
LAST_SHARE = 0.25  # of the newest measurement in a mean
KEPT_SHARE = 0.75  # of the sums over earlier steps, when one is added to them
FIRST_LIMIT = 2  # pages, before any copy has been measured
FIRST_GROWTH, LATER_GROWTH = 2.0, 1.125  # of the limit in a step, before copies have added too much once and after it


class RestoreLimit(Observer):
    """While sequences decode, bounds the pages that a step copies from the host by the time that they add to it.

    Steps of decodes only are compared, with and without pages from the host; those that go to the host for them count
    as theirs. A device that copies beside its computation has no time to add until the copies take longer, so what a
    page adds is measured all the time, and the limit follows in both directions. It is never below the pages that would
    be computed in the time of a step: so a restore takes no longer than computing would, which slows the others too.
    Owned by the engine thread.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        limits = scheduler.limits
        self._budget = scheduler.budget
        self._most = limits.max_page_restores
        self._page_tokens = limits.page_size / len(limits.page_groups)
        self._alone_s: float | None = None  # time of a step without copies
        self._added_s = self._num_copied = 0.0  # by the copies of the last steps that had any
        self._prompt_s = self._prompt_tokens = 0.0  # of the last steps that computed prompts
        self._growth = FIRST_GROWTH
        self._limit = self._budget.max_restores_beside_decodes = min(FIRST_LIMIT, self._most)

    def step_ended(self, step: Step) -> None:
        plan = step.plan
        if step.error is not None or step.waited_for_compiler or not plan.chunks or plan.burst > 1:
            return
        num_restored, num_saved = _num_copied(plan)
        if step.num_prefill_tokens > step.num_tokens // 2:
            if not num_restored:
                self._prompt_s = KEPT_SHARE * self._prompt_s + step.took_s
                self._prompt_tokens = KEPT_SHARE * self._prompt_tokens + step.num_tokens
        elif plan.num_decodes < len(plan.chunks):
            return
        elif num_restored and self._alone_s is not None:
            self._added_s = KEPT_SHARE * self._added_s + step.took_s - self._alone_s
            self._num_copied = KEPT_SHARE * self._num_copied + num_restored
            self._follow(self._alone_s, max(0.0, self._added_s / self._num_copied))
        elif not num_restored and not num_saved:
            before = self._alone_s
            self._alone_s = step.took_s if before is None else before + LAST_SHARE * (step.took_s - before)

    def _follow(self, alone_s: float, page_s: float) -> None:
        """A step takes `alone_s`, and `page_s` for each page."""
        allowed_s = MAX_SLOWDOWN * alone_s
        pages = int(allowed_s / page_s) if page_s * self._most > allowed_s else self._most
        if pages < self._limit:
            self._growth = LATER_GROWTH
        pages = max(1, min(pages, ceil(self._growth * self._limit)))
        if self._prompt_tokens:
            saved_s = self._page_tokens * self._prompt_s / self._prompt_tokens - page_s  # by a page that is copied
            if saved_s > 0:
                pages = max(pages, ceil(alone_s / saved_s))
        self._limit = self._budget.max_restores_beside_decodes = min(pages, self._most)


def _num_copied(plan: StepPlan) -> tuple[int, int]:
    """The pages that come from the host, and those that go there."""
    from_host = sum(copy.source.tier is Tier.HOST for copy in plan.copies)
    return from_host, sum(copy.target.tier is Tier.HOST for copy in plan.copies)
