"""Finds the pages that can be restored, and tracks them."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from quire.core.host_tier import HostTier, prefix_digests
from quire.core.plan import PageCopy, Place, Tier
from quire.core.prefix_tree import Match
from quire.core.restore import HostPage, Restore, Row
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
    host, device = Tier.HOST, Tier.DEVICE
    return [
        PageCopy(Place(host, source.page), Place(device, target))
        for source, target in zip(sources, targets, strict=True)
    ]


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

        @cache  # each is asked for twice
        def page_of(index: int, group: int) -> HostPage | int | None:
            if index < len(match.path) and (page := match.path[index].pages[group]):
                return page
            return self._host.find(digests[index], group)

        end = self._end(page_of, first, max_pages)
        if end <= first:
            return None
        needed = [self._first_needed(group, end) for group in range(len(self._groups))]
        rows: list[Row] = []
        for index in range(first, end):
            row: list[HostPage | int] = []
            for group, first_needed in enumerate(needed):
                page = page_of(index, group) if index >= first_needed else 0
                assert page is not None
                row.append(page)
            rows.append(tuple(row))
        return Restore(rows, end)

    def _first_needed(self, group: int, num_pages: int) -> int:
        """The first page of a group that going on after so many reads."""
        reach = self._groups[group]
        return 0 if reach is None else first_page(reach, num_pages * self._page_size, self._page_size)

    def _end(self, page_of: Callable[[int, int], HostPage | int | None], first: int, most: int) -> int:
        """The most pages, of `first` to `most`, after which every group has what going on reads."""
        end = most
        for group, reach in enumerate(self._groups):
            if reach is None:
                end = next((index for index in range(first, end) if page_of(index, group) is None), end)
        while end > first:
            missing = [
                index
                for group, reach in enumerate(self._groups)
                if reach is not None
                for index in range(max(first, self._first_needed(group, end)), end)
                if page_of(index, group) is None
            ]
            if not missing:
                break
            end = min(missing)
        return end
