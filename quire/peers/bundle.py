"""Pages of a prompt on their way between two engines."""

from collections.abc import Callable
from typing import NamedTuple


class PageForm(NamedTuple):
    """The numbers of pages that both engines agree on; the rest is compared by facts."""

    page_size: int  # tokens
    page_bytes: int  # of all layers of a page
    windows: tuple[int | None, ...]  # of each page group; None: it has the pages of all positions

    def num_needed(self, group: int) -> int | None:
        """The pages of a group before a page boundary that going on there reads; None for all."""
        window = self.windows[group]
        return None if window is None else -(-(window - 1) // self.page_size)


class PageRange(NamedTuple):
    """Pages of a prompt: of each page group those from `firsts` on, up to `end`, one group after the other."""

    firsts: tuple[int, ...]
    end: int

    @property
    def num_pages(self) -> int:
        return sum(self.end - first for first in self.firsts)

    def rows(self) -> list[tuple[int, int]]:
        """The place in the prompt and the group of each page."""
        return [(index, group) for group, first in enumerate(self.firsts) for index in range(first, self.end)]


class PageBundle(NamedTuple):
    """Pages that were received."""

    range: PageRange
    data: memoryview  # [pages, page_bytes]


def longest_range(form: PageForm, first: int, most: int, has: Callable[[int, int], bool]) -> PageRange:
    """The most pages from `first` on, up to `most`, after which every group has what going on reads.

    `has` tells of a page's place and its group whether it can be had."""
    needed = [form.num_needed(group) for group in range(len(form.windows))]
    end = most
    for group, count in enumerate(needed):
        if count is None:
            end = next((place for place in range(first, end) if not has(place, group)), end)
    while end > first:
        windows = [(group, max(first, end - count)) for group, count in enumerate(needed) if count is not None]
        missing = [place for group, begin in windows for place in range(begin, end) if not has(place, group)]
        if not missing:
            break
        end = min(missing)
    return PageRange(tuple(first if count is None else max(first, end - count) for count in needed), end)


def problem(form: PageForm, pages: PageRange, page_bytes: int, first: int, num_tokens: int) -> str | None:
    """The defect of these pages, where those before `first` of a prompt of `num_tokens` are there already."""
    firsts, end = pages
    if page_bytes != form.page_bytes:
        return f"pages have {page_bytes} bytes; they must have {form.page_bytes}"
    if len(firsts) != len(form.windows):
        return f"there are {len(firsts)} page groups; there must be {len(form.windows)}"
    if not first <= end <= num_tokens // form.page_size:
        return f"pages end at {end}; they must end between {first} and {num_tokens // form.page_size}"
    for group, (begin, window) in enumerate(zip(firsts, form.windows, strict=True)):
        if not first <= begin <= end or (window is None and begin != first):
            return f"pages of group {group} begin at {begin}; those before {first} are there, they end at {end}"
    return None
