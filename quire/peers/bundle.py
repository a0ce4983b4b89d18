"""Pages of a prompt on their way between two engines."""

from collections.abc import Callable
from typing import NamedTuple

from quire.reach import Reach, first_page


class PageForm(NamedTuple):
    """The numbers of pages that both engines agree on; the rest is compared by facts."""

    page_size: int  # tokens
    page_bytes: int  # of all layers of a page
    groups: tuple[Reach, ...]  # the positions that each page group reads

    def first_needed(self, group: int, num_pages: int) -> int:
        """The first page of a group that going on after `num_pages` reads."""
        reach = self.groups[group]
        return 0 if reach is None else first_page(reach, num_pages * self.page_size, self.page_size)


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
    end = most
    for group, reach in enumerate(form.groups):
        if reach is None:
            end = next((place for place in range(first, end) if not has(place, group)), end)
    while end > first:
        windows = [group for group, reach in enumerate(form.groups) if reach is not None]
        begins = [(group, max(first, form.first_needed(group, end))) for group in windows]
        missing = [place for group, begin in begins for place in range(begin, end) if not has(place, group)]
        if not missing:
            break
        end = min(missing)
    return PageRange(tuple(max(first, form.first_needed(group, end)) for group in range(len(form.groups))), end)


def problem(form: PageForm, pages: PageRange, page_bytes: int, first: int, num_tokens: int) -> str | None:
    """The defect of these pages, where those before `first` of a prompt of `num_tokens` are there already."""
    firsts, end = pages
    if page_bytes != form.page_bytes:
        return f"pages have {page_bytes} bytes; they must have {form.page_bytes}"
    if len(firsts) != len(form.groups):
        return f"there are {len(firsts)} page groups; there must be {len(form.groups)}"
    if not first <= end <= num_tokens // form.page_size:
        return f"pages end at {end}; they must end between {first} and {num_tokens // form.page_size}"
    for group, (begin, reach) in enumerate(zip(firsts, form.groups, strict=True)):
        if not first <= begin <= end or (reach is None and begin != first):
            return f"pages of group {group} begin at {begin}; those before {first} are there, they end at {end}"
    return None
