"""Finds the pages that can be restored, and tracks them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.core.host_tier import HostPage, HostTier, Restore, prefix_digests
from quire.core.plan import PageCopy, copy_from_host
from quire.core.prefix_cache import Match
from quire.core.sequence import Sequence as Sample
from quire.reach import Reach, first_page


class Restoring(NamedTuple):
    """A restore in a step: the sequence has its positions before `end` when the step has its result."""

    sequence: Sample
    epoch: int
    end: int
    pages: list[HostPage]  # that are read


class Moves(NamedTuple):
    """The copies between tiers of a step under way."""

    saved: list[HostPage]
    restored: list[Restoring]


def copies_to(sources: Iterable[HostPage], targets: Iterable[int]) -> list[PageCopy]:
    return [copy_from_host(source.page, target) for source, target in zip(sources, targets, strict=True)]


def abandon(host: HostTier, moves: Moves) -> None:
    """The step failed. A page that it read may be the reason, and is not read again."""
    host.abandon(moves.saved)
    for restoring in moves.restored:
        host.distrust(restoring.pages)
        host.release(restoring.pages)


class Restores:
    """Finds prefixes that continue on the host. Owned by `Running`."""

    def __init__(self, host: HostTier, page_size: int, groups: Sequence[Reach]) -> None:
        self._host = host
        self._page_size = page_size
        self._groups = tuple(groups)

    def find(self, sequence: Sample, match: Match) -> Restore | None:
        """The pages after `match` with which the sequence begins later, if there are any."""
        max_pages = sequence.num_reusable // self._page_size
        first = match.cursor.num_pages
        if first >= max_pages:
            return None
        digests = prefix_digests(sequence.salt, sequence.tokens, self._page_size, max_pages, sequence.digests)
        find, path = self._host.find, match.path

        def pages_of(group: int, begin: int, end: int) -> list[HostPage | int]:
            """The pages of a group, up to the first that is missing."""
            pages: list[HostPage | int] = []
            for index in range(begin, end):
                page: HostPage | int | None = path[index].pages[group] if index < len(path) else 0
                if not page and (page := find(digests[index], group)) is None:
                    break
                pages.append(page)
            return pages

        end, windows, columns = max_pages, [], {}
        for group, reach in enumerate(self._groups):
            if reach is not None:
                windows.append(group)
                continue
            columns[group] = pages_of(group, first, end)  # all are read
            end = first + len(columns[group])
        while end > first:  # the most pages after which every other group has what going on reads
            begins = [max(first, self._first_needed(group, end)) for group in windows]
            pages_after = [pages_of(group, begin, end) for group, begin in zip(windows, begins, strict=True)]
            reached = min((begin + len(pages) for begin, pages in zip(begins, pages_after, strict=True)), default=end)
            if reached == end:
                columns |= {
                    group: [*[0] * (begin - first), *pages]
                    for group, begin, pages in zip(windows, begins, pages_after, strict=True)
                }
                in_order = (columns[group][: end - first] for group in range(len(self._groups)))
                return Restore(list(zip(*in_order, strict=True)), end)
            end = reached
        return None

    def _first_needed(self, group: int, num_pages: int) -> int:
        """The first page of a group that going on after so many reads."""
        reach = self._groups[group]
        return 0 if reach is None else first_page(reach, num_pages * self._page_size, self._page_size)
