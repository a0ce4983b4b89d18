"""Prefixes that are read for other engines, and prefixes that come from them."""

from collections.abc import Iterable, Sequence

from quire.core.host_tier import HostPage, prefix_digests
from quire.core.limits import Limits
from quire.core.requests import Requests
from quire.core.running import Running
from quire.request import Request

Row = tuple[int, int]  # a page of a prompt: its place among the prompt's pages, and its group


class PrefixExchange:
    """Finds the pages of a prompt by their tokens. Holds none: between two calls they may be evicted.

    Pages that come from elsewhere enter the host tier, from which a match restores them. Owned by the scheduler.
    """

    def __init__(self, limits: Limits, running: Running, requests: Requests) -> None:
        self._page_size = limits.page_size
        self._num_groups = len(limits.page_groups)
        self._running = running
        self._requests = requests

    @property
    def room(self) -> int:
        """Pages of a prompt that may come from elsewhere: half of the host tier, so that none evicts another."""
        return 0 if self._running.host is None else self._running.host.num_usable // 2

    def num_cached(self, request: Request) -> int:
        """Pages of the prompt that need not be computed, from its beginning."""
        most = (len(request.prompt) - 1) // self._page_size  # the last token is computed in any case
        salt, host = self._requests.salt_of(request), self._running.host
        count = self._running.cache.match(salt, request.prompt, most * self._page_size).cursor.num_pages
        if host is None or count >= most:
            return count
        digests = prefix_digests(salt, request.prompt, self._page_size, most, [])
        groups = range(self._num_groups)
        while count < most and all(host.find(digests[count], group) is not None for group in groups):
            count += 1
        return count

    def names(self, request: Request, adapter_digest: str) -> list[bytes]:
        """The digest of the prefix that ends with each whole page of the prompt, the same in every process: an adapter
        counts by the digest of its weights, since its number is another one elsewhere."""
        salt, num_pages = self._requests.salt_with(request, adapter_digest), len(request.prompt) // self._page_size
        return prefix_digests(salt, request.prompt, self._page_size, num_pages, [])

    def find(self, request: Request, first: int) -> tuple[tuple[int, ...], int]:
        """The pages from `first` on that are on the device: of each group the first one that going on after them reads,
        and their end."""
        end, tables = self._tables(request, len(request.prompt))
        end = max(first, end)
        return tuple(max(first, table.count(0)) for table in tables), end

    def pages(self, request: Request, rows: Iterable[Row], end: int) -> list[int] | None:
        """The device's page of each row, of those that going on at page `end` reads; None where one is not there."""
        found_end, tables = self._tables(request, end * self._page_size)
        return [tables[group][index] for index, group in rows] if found_end == end else None

    def _tables(self, request: Request, max_tokens: int) -> tuple[int, list[list[int]]]:
        cache = self._running.cache
        match = cache.match(self._requests.salt_of(request), request.prompt, max_tokens)
        return match.cursor.num_pages, cache.tables(match)

    def reserve(self, request: Request, rows: Sequence[Row]) -> list[tuple[int, HostPage]] | None:
        """Pages of the host for rows that come from elsewhere, each with its place among `rows`. Rows that the tier has
        already, or has no room for, get none. None where that is all of them, and not for the first reason alone. Ended
        by `confirm` or `abandon`."""
        host = self._running.host
        if host is None or not rows:
            return []
        most = 1 + max(index for index, _ in rows)
        digests = prefix_digests(self._requests.salt_of(request), request.prompt, self._page_size, most, [])
        reserved: list[tuple[int, HostPage]] = []
        is_full = False
        for place, (index, group) in enumerate(rows):
            page = host.reserve((digests[index], group))
            if page is not None:
                reserved.append((place, page))
            elif not host.has((digests[index], group)):
                is_full = True
        return None if is_full and not reserved else reserved

    def confirm(self, reserved: Iterable[HostPage]) -> None:
        """They are written."""
        assert self._running.host is not None
        self._running.host.confirm(reserved)

    def abandon(self, reserved: Iterable[HostPage]) -> None:
        """They could not be written."""
        assert self._running.host is not None
        self._running.host.abandon(reserved)
