"""The invariants of the prefix cache and of running sequences, and faults in their accounts."""

from quire.core.prefix_cache import PrefixCache
from quire.core.prefix_tree import TOKEN_BYTES, Node
from quire.core.running import Running
from quire.core.sequence import State
from quire.reach import first_page


def count_evictable(cache: PrefixCache) -> int:
    """The correct `num_evictable` of the cache, counted over all pages."""
    pinned: set[Node] = set()
    count = 0
    for page, held in cache._node_of.items():
        in_full_group = cache._is_full[held.pages.index(page)]
        count += not in_full_group and cache._pool.holders(page) == 1
        node: Node | None = held if in_full_group and cache._pool.holders(page) > 1 else None
        while node is not None and node not in pinned:
            pinned.add(node)
            node = node.parent
    return count + sum(cache._num_full for node in set(cache._node_of.values()) if node not in pinned)


def check_cache(cache: PrefixCache) -> None:
    """Assert every invariant of the prefix cache."""
    seen: dict[int, Node] = {}
    for salt, root in cache._roots.items():
        assert root.children, f"the root of {salt!r} is empty and was not removed"
        for node in root.below():
            assert len(node.key) == TOKEN_BYTES * cache._page_size, "a page with a part of its tokens is in the tree"
            assert all(child.parent is node for child in node.children.values())
            assert node.children or any(node.pages), "the tree has a branch without pages"
            missing = [full for full, page in zip(cache._is_full, node.pages, strict=True) if not page]
            assert not any(missing), "a node has no page of a full group"
            for group, page in enumerate(node.pages):
                if not page:
                    continue
                assert page not in seen, f"page {page} is in the tree twice"
                seen[page] = node
                assert cache._pool.holders(page) >= 1, f"page {page} is in the tree and free"
                kept = cache._pool.holders(page) > 1
                if cache._is_full[group]:
                    kept = bool(node.children or node.pins or group != cache._is_full.index(True))
                assert kept or page in cache._candidates, f"page {page} can be evicted and is not listed"
    assert seen == cache._node_of, "the index and the tree differ"
    assert set(cache._candidates) <= seen.keys(), "a page is listed that is not in the tree"
    counted = count_evictable(cache)
    assert counted == cache.num_evictable, f"{counted} pages can be evicted, {cache.num_evictable} are counted"


def page_discrepancies(running: Running) -> list[str]:
    """A line for each page with a wrong count of holders, and one for each other wrong count."""
    pool, cache = running.pool, running.cache
    owners: dict[int, list[str]] = {page: ["the prefix cache"] for page in cache.pages()}
    for sequence in running:
        shared = [] if sequence.restore is None else sequence.restore.device_pages()
        for page in (page for table in (*sequence.tables, shared) for page in table if page):
            owners.setdefault(page, []).append(f"request {sequence.request_id}")
    free = pool.free_pages()
    lines = []
    for page in range(1, pool.num_pages):
        known, counted, times_free = owners.get(page, []), pool.holders(page), free.get(page, 0)
        if counted != len(known) or times_free != (not known):
            by = ", ".join(known) or "none"
            lines.append(f"page {page} is held by {by}; {counted} holders are counted, it is free {times_free} times")
    evictable = count_evictable(cache)
    if evictable != cache.num_evictable:
        lines.append(f"{evictable} pages of the prefix cache can be evicted; {cache.num_evictable} are counted")
    return lines


def check_running(running: Running) -> None:
    """Assert every invariant of the sequences that run, their slots and their pages."""
    running.pool.check()
    check_cache(running.cache)
    if running.snapshots is not None:
        running.snapshots.check()
    if running.host is not None:
        running.host.check()
    running.adapters.check(running)
    assert not page_discrepancies(running)
    slots = list(running._free_slots)
    for sequence in running:
        slots.append(sequence.slot)
        pages = [page for table in sequence.tables for page in table if page]
        assert len(set(pages)) == len(pages), f"sequence {sequence.id} has a page twice"
        for table, held, reach in zip(sequence.tables, sequence.first_held, running._limits.page_groups, strict=True):
            assert sequence.page_end == len(table) * running._page_size
            assert not any(table[:held])
            assert all(table[held:])
            confirmed = max(sequence.num_computed, sequence.restore_end)
            first = 0 if reach is None else first_page(reach, confirmed, running._page_size)
            assert held <= first, "a page was given back early"
        assert sequence.plain_end <= sequence.page_end
        assert running.saves is None or sequence.save_at > sequence.num_planned or sequence.id in running.prefilling
        assert sequence.num_computed <= sequence.num_planned <= sequence.page_end
        assert 0 <= sequence.num_unsure <= sequence.num_planned - sequence.num_computed
        assert sequence.num_computed <= len(sequence.tokens) <= max(sequence.limit, sequence.num_prompt)
    assert sorted(slots) == list(range(running._limits.max_batch_size)), "a slot is lost or owned twice"
    assert not running.prefilling.keys() & running.decoding.keys()
    assert all(sequence.state is State.PREFILLING for sequence in running.prefilling.values())
    assert all(sequence.state is State.DECODING for sequence in running.decoding.values())
    assert running.max_tokens == sum(sequence.limit for sequence in running), "the sum of the limits is wrong"
    assert running.num_guided == sum(sequence.request.grammar is not None for sequence in running)
