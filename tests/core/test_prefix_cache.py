"""Prefixes in the cache: found, shared, evicted and given back."""

from typing import Any

import pytest

from quire.core.page_pool import PagePool
from quire.core.prefix_cache import Match, PrefixCache
from quire.core.snapshots import Snapshots
from quire.reach import ChunkReach


def cached(num_pages: int = 16, page_size: int = 2) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, page_size)


def found(
    cache: PrefixCache, tokens: Any, max_tokens: int = 99, salt: str = "", known: Match | None = None
) -> list[int]:
    """The pages of the first group."""
    return cache.tables(cache.match(salt, tokens, max_tokens, known))[0]


def enter(pool: PagePool, cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """Compute a prefix and let go of it, as a sequence does that ends."""
    pages = pool.take(len(tokens) // 2)
    cache.publish(salt, tokens, [pages], len(pages))
    cache.release(pages)
    cache.check()
    return pages


def test_the_longest_prefix_in_whole_pages_is_found():
    pool, cache = cached()
    pages = enter(pool, cache, [1, 2, 3, 4, 5, 6])
    assert found(cache, [1, 2, 3, 4, 5, 6, 7]) == pages
    assert found(cache, [1, 2, 3, 4, 5, 9]) == pages[:2]
    assert found(cache, [1, 2, 3]) == pages[:1]
    assert found(cache, [1, 2, 3, 4], 2) == pages[:1]
    assert found(cache, [2, 1]) == []
    assert found(cache, [1, 2, 3, 4], salt="other") == []


def test_branches_share_their_common_pages():
    pool, cache = cached()
    first = enter(pool, cache, [1, 2, 3, 4])
    enter(pool, cache, [1, 2, 5, 6])
    assert len(cache.pages()) == 3, "the common page was kept twice"
    assert found(cache, [1, 2, 5, 6])[0] == first[0]


def test_a_page_computed_twice_stays_private_to_the_second():
    pool, cache = cached()
    enter(pool, cache, [1, 2])
    (page,) = pool.take(1)
    cache.publish("", [1, 2], [[page]], 1)
    cache.check()
    assert pool.holders(page) == 1
    cache.release([page])
    assert pool.holders(page) == 0


def test_eviction_takes_the_least_recently_used_from_its_end():
    pool, cache = cached()
    old = enter(pool, cache, [1, 2, 3, 4])
    new = enter(pool, cache, [5, 6, 7, 8])
    cache.match("", [1, 2, 3, 4], 9)
    assert cache.evict(1) == 1
    assert pool.holders(new[1]) == 0
    assert cache.evict(1) == 1
    assert pool.holders(new[0]) == 0
    assert cache.evict(1) == 1
    assert pool.holders(old[1]) == 0
    assert cache.evict(5) == 1
    assert len(cache.pages()) == 0
    cache.check()


def test_a_prefix_is_evicted_only_as_far_as_it_was_used_before_others():
    pool, cache = cached()
    old = enter(pool, cache, [1, 2, 3, 4, 5, 6])
    new = enter(pool, cache, [7, 8, 9, 9])
    cache.match("", [1, 2], 9)
    assert cache.evict(3) == 3
    assert [pool.holders(page) for page in (*old, *new)] == [1, 0, 0, 1, 0], "its beginning was used last"
    cache.check()
    assert cache.evict(9) == 2


def test_using_a_page_uses_those_before_it():
    pool, cache = cached()
    enter(pool, cache, [1, 2, 3, 4])
    held = pool.take(1)
    cache.publish("", [5, 6], [held], 1)
    cache.match("", [1, 2, 3, 4], 9)
    assert cache.evict(1) == 1
    cache.release(held)
    assert cache.evict(1) == 1
    assert len(found(cache, [1, 2])) == 1, "it went although it was used last"


def test_held_pages_are_not_evicted_and_can_be_once_released():
    pool, cache = cached()
    pages = enter(pool, cache, [1, 2, 3, 4])
    cache.hold(pages[:1])
    assert cache.evict(9) == 1
    assert found(cache, [1, 2, 3, 4]) == pages[:1]
    cache.release(pages[:1])
    assert cache.evict(9) == 1


def test_pages_that_are_held_again_are_not_evicted():
    pool, cache = cached()
    pages = enter(pool, cache, [1, 2, 3, 4])
    cache.hold(pages)
    assert cache.evict(9) == 0
    assert found(cache, [1, 2, 3, 4]) == pages
    cache.release(pages)
    assert cache.evict(9) == 2


def test_taking_evicts_only_the_shortage_and_nothing_when_that_would_not_do():
    pool, cache = cached(num_pages=5)
    enter(pool, cache, [1, 2, 3, 4])
    assert cache.take(5) is None
    assert len(cache.pages()) == 2
    assert len(cache.take(3)) == 3
    assert len(cache.pages()) == 1


def test_taking_evicts_nothing_when_pages_before_held_ones_would_be_needed():
    """A page that two sequences computed is the first one's in the tree, and what the second computed follows it."""
    pool, cache = cached(num_pages=6)
    (shared,) = enter(pool, cache, [1, 2])
    (unused,) = enter(pool, cache, [9, 9])
    mine = pool.take(2)
    cache.publish("", [1, 2, 3, 4], [mine], 2)
    cache.check()
    assert pool.num_free == 1
    assert cache.num_available == 2
    assert cache.take(3) is None
    assert found(cache, [9, 9], 2) == [unused]
    assert cache.num_evicted == 0
    cache.release(mine)
    cache.check()
    assert cache.num_available == 5
    assert set(cache.take(5)) == {shared, unused, *mine, 5}


def test_dropping_a_salt_forgets_it_and_leaves_its_holders_their_pages():
    pool, cache = cached()
    pages = enter(pool, cache, [1, 2, 3, 4], salt="a")
    enter(pool, cache, [1, 2], salt="b")
    cache.hold(pages)
    cache.drop("a")
    cache.check()
    assert len(cache.pages()) == 1
    assert all(pool.holders(page) == 1 for page in pages)
    cache.release(pages)
    assert pool.num_free == 14


def test_many_dropped_salts_leave_no_trace():
    pool, cache = cached()
    for number in range(2000):
        enter(pool, cache, [number, 1], salt=str(number))
        cache.drop(str(number))
    assert len(cache._candidates) < 200
    assert not cache._roots


class CountedTokens(list[int]):
    """Counts how often a page of them is looked at."""

    looks = 0

    def __getitem__(self, at):
        self.looks += 1
        return super().__getitem__(at)


def test_a_prefix_that_grows_is_published_from_where_it_was():
    pool, cache = cached(num_pages=120)
    tokens = CountedTokens(range(200))
    pages = pool.take(100)
    cursor = None
    for count in range(1, 101):
        cursor = cache.publish("", tokens, [pages], count, cursor)
    assert tokens.looks == 100
    assert found(cache, range(200), 200) == pages


def test_a_match_goes_on_from_where_it_was_and_begins_again_when_that_was_evicted():
    pool, cache = cached()
    tokens = CountedTokens(range(10))
    first = enter(pool, cache, list(range(6)))
    match = cache.match("", tokens, 10)
    assert cache.tables(match) == [first]
    looks = tokens.looks
    assert found(cache, tokens, 10, known=match) == first
    assert tokens.looks == looks + 2, "the page that was missing is looked for, then one that begins like it"
    cache.evict(3)
    second = enter(pool, cache, list(range(8)))
    assert found(cache, tokens, 10, known=match) == second


def test_what_was_evicted_after_it_was_published_is_entered_anew():
    """A page computed twice is not the tree's: the tree's can go while the second computer still runs."""
    pool, cache = cached()
    enter(pool, cache, [1, 2])
    mine = pool.take(2)
    cursor = cache.publish("", [1, 2], [mine], 1)
    assert cache.evict(1) == 1
    cache.publish("", [1, 2, 3, 4], [mine], 2, cursor)
    cache.check()
    assert found(cache, [1, 2, 3, 4], 4) == mine


def test_any_text_can_be_a_salt():
    pool, cache = cached()
    for salt in ("", "é", "\ud800", "\x00"):
        pages = enter(pool, cache, [1, 2], salt=salt)
        assert found(cache, [1, 2], salt=salt) == pages
    assert cache.evict(9) == 4
    assert not cache._roots


def test_going_on_needs_the_pages_of_the_last_window_alone():
    pool = PagePool(30)
    cache = PrefixCache(pool, 2, (None, 4))
    tokens = list(range(12))
    tables = [pool.take(6), pool.take(6)]
    cache.publish("", tokens, tables, 6)
    for table in tables:
        cache.release(table)
    match = cache.match("", tokens, 12)
    # Position 12 reads 9 to 11 in the second group, which are in its last two pages.
    assert cache.tables(match) == [tables[0], [0, 0, 0, 0, *tables[1][4:]]]


def test_going_on_needs_the_pages_of_the_chunk_that_has_begun():
    pool = PagePool(40)
    cache = PrefixCache(pool, 2, (None, ChunkReach(6)))
    tokens = list(range(16))
    tables = [pool.take(8), pool.take(8)]
    cache.publish("", tokens, tables, 8)
    for table in tables:
        cache.release(table)
    # Position 16 is in the chunk that begins at 12, position 12 begins it.
    assert cache.tables(cache.match("", tokens, 16))[1] == [0] * 6 + tables[1][6:]
    assert cache.tables(cache.match("", tokens, 12))[1] == [0] * 6


def test_a_prefix_ends_where_every_group_can_go_on():
    pool = PagePool(30)
    cache = PrefixCache(pool, 2, (None, 4))
    tokens = list(range(12))
    full, window = pool.take(6), pool.take(6)
    window[3] = 0
    cache.publish("", tokens, [full, window], 6)
    cache.check()
    lengths = {most: cache.match("", tokens, most).cursor.num_pages for most in (12, 10, 8, 6)}
    assert lengths == {12: 6, 10: 3, 8: 3, 6: 3}


def test_pages_of_a_window_are_evicted_on_their_own_and_can_be_computed_again():
    pool = PagePool(30)
    cache = PrefixCache(pool, 2, (None, 3))
    tokens = list(range(8))
    full, window = pool.take(4), pool.take(4)
    cache.publish("", tokens, [full, window], 4)
    cache.release(window[:3])
    cache.check()
    assert cache.num_evictable == 3, "the page after them is held, and they need not stay for it"
    assert cache.evict(3) == 3
    assert cache.match("", tokens, 6).cursor.num_pages == 0
    assert cache.match("", tokens, 8).cursor.num_pages == 4
    again = pool.take(1)
    cache.publish("", tokens, [full, [0, 0, *again, window[3]]], 4)
    assert cache.match("", tokens, 6).cursor.num_pages == 3
    cache.check()


def test_a_page_of_a_window_that_is_held_again_is_not_evicted():
    pool = PagePool(30)
    cache = PrefixCache(pool, 2, (3,))
    pages = pool.take(1)
    cache.publish("", [1, 2], [pages], 1)
    cache.release(pages)
    cache.hold(pages)
    assert (cache.num_evictable, cache.evict(9)) == (0, 0)
    assert cache.match("", [1, 2], 2).cursor.num_pages == 1
    cache.release(pages)
    assert (cache.num_evictable, cache.evict(9)) == (1, 1)


def test_no_branch_without_pages_stays_in_the_tree():
    pool = PagePool(30)
    cache = PrefixCache(pool, 2, (3,))
    table = pool.take(3)
    cache.publish("", list(range(6)), [table], 3)
    cache.release(table[:2])
    assert cache.evict(2) == 2
    assert cache.match("", list(range(6)), 6).cursor.num_pages == 3, "the last page is all that going on reads"
    cache.release(table[2:])
    assert cache.evict(9) == 1
    assert not cache._roots


def test_with_a_leaf_go_the_pages_of_all_its_groups():
    pool = PagePool(30)
    cache = PrefixCache(pool, 2, (None, 9, None))
    tables = [pool.take(2) for _ in range(3)]
    cache.publish("", [1, 2, 3, 4], tables, 2)
    cache.hold([tables[1][1]])
    for table in tables:
        cache.release(table)
    assert cache.num_evictable == 5
    assert cache.evict(1) == 1, "the page of a window goes first: it was let go first"
    assert cache.evict(1) == 2
    assert [pool.holders(table[1]) for table in tables] == [0, 1, 0], "a sequence keeps its page of the window"
    cache.check()
    assert cache.evict(9) == 2
    cache.release([tables[1][1]])
    assert pool.num_free == 29


def test_a_page_that_begins_like_the_next_tokens_is_found_if_half_of_it_does():
    pool, cache = cached(page_size=4)
    first, second = pool.take(2), pool.take(2)
    cache.publish("", [0, 0, 0, 0, 1, 2, 3, 4], [first], 2)
    cache.publish("", [0, 0, 0, 0, 1, 2, 9, 9], [second], 2)
    for tokens, most, partial in (
        ([0, 0, 0, 0, 1, 2, 3, 7], 8, (first[1], 3)),
        ([0, 0, 0, 0, 1, 2, 9, 7], 8, (second[1], 3)),
        ([0, 0, 0, 0, 1, 2, 3, 4], 7, (first[1], 3)),
        ([0, 0, 0, 0, 1, 2, 3, 4], 6, (second[1], 2)),
        ([0, 0, 0, 0, 1, 7, 3, 4], 8, (None, 0)),
        ([0, 0, 0, 0, 1, 2, 3, 4], 5, (None, 0)),
        ([0, 0, 0, 7], 4, (first[0], 3)),
    ):
        match = cache.match("", tokens, most)
        assert (match.partial_page and match.partial_page.pages[0], match.num_partial_tokens) == partial


@pytest.mark.parametrize("is_there", [True, False])
def test_a_page_that_a_group_lacks_is_not_found_by_its_beginning(is_there):
    pool = PagePool(30)
    cache = PrefixCache(pool, 4, (None, 5))
    full, window = pool.take(2), pool.take(2)
    cache.publish("", [0, 0, 0, 0, 1, 2, 3, 4], [full, window if is_there else [window[0], 0]], 2)
    assert (cache.match("", [0, 0, 0, 0, 1, 2, 3, 7], 8).partial_page is not None) == is_there


def test_pages_of_a_sequence_replace_those_of_the_same_tokens_that_only_the_tree_holds():
    pool = PagePool(16)
    cache = PrefixCache(pool, 2, snapshots=Snapshots(2))
    first, second = pool.take(2), pool.take(3)
    cache.publish("", [1, 2, 3, 4], [first], 2)
    cursor = cache.publish("", [1, 2, 3, 4, 5, 6], [second], 3)
    assert cache.deduplicate(cursor, [second]) == 0, "another sequence holds them"
    cache.release(first)
    assert cache.deduplicate(cursor, [second]) == 2
    assert set(cache.pages()) == set(second)
    cache.check()
    cache.release(second)
    assert cache.evict(9) == 3
    cache.check()
    assert pool.num_free == 15
