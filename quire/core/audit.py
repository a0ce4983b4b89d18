"""Whether the accounts of pages are right, and what is wrong with them."""

from collections.abc import Iterable

from quire.core.page_pool import PagePool
from quire.core.prefix_cache import PrefixCache
from quire.core.sequence import Sequence


def discrepancies(pool: PagePool, cache: PrefixCache, running: Iterable[Sequence]) -> list[str]:
    """A line for each page whose holders are not those who know of it, and one for a count that is off."""
    owners: dict[int, list[str]] = {page: ["the prefix cache"] for page in cache.pages()}
    for sequence in running:
        for page in sequence.pages:
            owners.setdefault(page, []).append(f"request {sequence.request_id}")
    free = pool.free_pages()
    lines = []
    for page in range(1, pool.num_pages):
        known, counted, times_free = owners.get(page, []), pool.holders(page), free.get(page, 0)
        if counted != len(known) or times_free != (not known):
            who = ", ".join(known) or "nobody"
            lines.append(f"page {page} is held by {who}; {counted} holders are counted, it is free {times_free} times")
    evictable = cache.count_evictable()
    if evictable != cache.num_evictable:
        lines.append(f"{evictable} pages of the prefix cache can be evicted; {cache.num_evictable} are counted")
    return lines
