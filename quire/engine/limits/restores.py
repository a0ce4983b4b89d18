"""The number of pages that a step in which sequences decode copies from the host."""

from math import ceil
from typing import NamedTuple

MAX_SLOWDOWN = 0.05  # of a step by the copies that are a part of it
KEPT_SHARE = 0.75  # of what earlier copies added, when those of a step are counted
FIRST_LIMIT = 2  # pages, before any copy has been measured
FIRST_GROWTH, LATER_GROWTH = 2.0, 1.125  # of the limit in a step, before copies have added too much once and after it

FIRST_PAGES = 16  # of a step that computes meanwhile, before any copy has been measured
GROWTH = 1 / 64  # of the pages of a step that had them in time, once one has had to wait; they double before
BLOCK = 16  # pages that travel together: a step copies whole blocks, if it copies so many
# A step that copied a smaller share of the pages allowed says little of the time of a page: a few may be late for other
# reasons. No step lowers the number of pages by more.
LEAST_SHARE = 0.5
ROUNDING = 1e-9  # so that a half of 192 is 96
MAX_WAIT = 0.02  # of a step's time, for which its result may wait for copies
# Starting a copy takes the host time, so a step with many may be slow although it waited for none: the number falls
# then, but not below this. A step that copies has a fixed cost too, and fewer pages in each would make more such steps.
FEW_PAGES = 48


class CopiesInStep(NamedTuple):
    """The pages that a step copies where its copies are a part of it: as many as add a twentieth to its time.

    What a page adds is measured all the time, and the number follows in both directions. It is never below the pages
    that would be computed in the time of a step: so a restore takes no longer than computing would, which slows the
    others too.
    """

    num_pages: int
    added_s: float = 0.0  # by the copies of the last steps that had any
    num_copied: float = 0.0
    growth: float = FIRST_GROWTH

    def after(
        self, num_restored: int, took_s: float, step_s: float, compute_page_s: float | None, most: int
    ) -> "CopiesInStep":
        """A step took `took_s` with `num_restored` pages and would have taken `step_s` without. `compute_page_s`: time
        to compute a page; None while it is unknown. `most`: pages of any step."""
        added_s = KEPT_SHARE * self.added_s + took_s - step_s
        num_copied = KEPT_SHARE * self.num_copied + num_restored
        page_s, allowed_s = max(0.0, added_s / num_copied), MAX_SLOWDOWN * step_s
        num_pages = int(allowed_s / page_s) if page_s * most > allowed_s else most
        growth = LATER_GROWTH if num_pages < self.num_pages else self.growth
        num_pages = max(1, min(num_pages, ceil(growth * self.num_pages)))
        if compute_page_s is not None and compute_page_s > page_s:
            num_pages = max(num_pages, ceil(step_s / (compute_page_s - page_s)))
        return CopiesInStep(min(num_pages, most), added_s, num_copied, growth)


class CopiesBesideStep(NamedTuple):
    """The pages that a step copies where the device computes meanwhile: as many as come in its time, in whole blocks.

    They cost others nothing as long as they come before the step has computed, and the host has time to begin them.
    """

    num_pages: int
    page_s: float | None = None  # time of a copy, or less
    growth: float = 1.0

    def after(
        self, num_restored: int, took_s: float, waited_s: float, step_s: float, *, is_slowed: bool, row: int, most: int
    ) -> "CopiesBesideStep":
        """A step took `took_s` with `num_restored` pages, for which it waited `waited_s`, and would have taken `step_s`
        without. `is_slowed`: it took longer, the wait apart. `row`: pages that are copied together, or fewer. `most`:
        pages of any step."""
        page_s, growth = self.page_s, self.growth
        has_waited = waited_s > MAX_WAIT * took_s
        if num_restored and (has_waited or (is_slowed and num_restored > FEW_PAGES)):
            if num_restored >= LEAST_SHARE * self.num_pages:
                least = LEAST_SHARE * self.num_pages
                if not has_waited:
                    least = max(least, FEW_PAGES)
                page_s, growth = min(took_s / num_restored, step_s / least), GROWTH
        elif num_restored > max(0, self.num_pages - row) and (not is_slowed or num_restored < FEW_PAGES):
            page_s = (step_s / num_restored if page_s is None else page_s) / (1 + growth)
        num_pages = int(step_s / page_s + ROUNDING) if page_s else self.num_pages
        return CopiesBesideStep(in_blocks(num_pages, most), page_s, growth)


def in_blocks(num_pages: int, most: int) -> int:
    num_pages = max(1, min(num_pages, most))
    return num_pages - num_pages % BLOCK if num_pages > BLOCK else num_pages
