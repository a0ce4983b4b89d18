"""The tree against a dictionary of prefixes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.core.page_pool import PagePool
from quire.core.prefix_cache import Match, Place, PrefixCache


def cached(num_pages: int = 16, page_size: int = 2) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, page_size)


def enter(pool: PagePool, cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """Compute a prefix and let go of it, as a sequence does that ends."""
    pages = pool.take(len(tokens) // 2)
    cache.publish(salt, tokens, pages)
    cache.release(pages)
    cache.check()
    return pages


def test_the_longest_prefix_in_whole_pages_is_found():
    pool, cache = cached()
    pages = enter(pool, cache, [1, 2, 3, 4, 5, 6])
    assert cache.match("", [1, 2, 3, 4, 5, 6, 7], 9).pages == pages
    assert cache.match("", [1, 2, 3, 4, 5, 9], 9).pages == pages[:2]
    assert cache.match("", [1, 2, 3], 9).pages == pages[:1]
    assert cache.match("", [1, 2, 3, 4], 1).pages == pages[:1]
    assert cache.match("", [2, 1], 9).pages == []
    assert cache.match("other", [1, 2, 3, 4], 9).pages == []


def test_branches_share_their_common_pages():
    pool, cache = cached()
    first = enter(pool, cache, [1, 2, 3, 4])
    enter(pool, cache, [1, 2, 5, 6])
    assert cache.num_pages == 3, "the common page was kept twice"
    assert cache.match("", [1, 2, 5, 6], 9).pages[0] == first[0]


def test_a_page_computed_twice_stays_private_to_the_second():
    pool, cache = cached()
    enter(pool, cache, [1, 2])
    (page,) = pool.take(1)
    cache.publish("", [1, 2], [page])
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
    assert cache.num_pages == 0
    cache.check()


def test_using_a_page_uses_those_before_it():
    pool, cache = cached()
    enter(pool, cache, [1, 2, 3, 4])
    held = pool.take(1)
    cache.publish("", [5, 6], held)
    cache.match("", [1, 2, 3, 4], 9)
    assert cache.evict(1) == 1
    cache.release(held)
    assert cache.evict(1) == 1
    assert len(cache.match("", [1, 2], 9).pages) == 1, "it went although it was used last"


def test_held_pages_are_not_evicted_and_can_be_once_released():
    pool, cache = cached()
    pages = enter(pool, cache, [1, 2, 3, 4])
    cache.hold(pages[:1])
    assert cache.evict(9) == 1
    assert cache.match("", [1, 2, 3, 4], 9).pages == pages[:1]
    cache.release(pages[:1])
    assert cache.evict(9) == 1


def test_pages_that_are_held_again_are_not_evicted():
    pool, cache = cached()
    pages = enter(pool, cache, [1, 2, 3, 4])
    cache.hold(pages)
    assert cache.evict(9) == 0
    assert cache.match("", [1, 2, 3, 4], 9).pages == pages
    cache.release(pages)
    assert cache.evict(9) == 2


def test_taking_evicts_only_the_shortage_and_nothing_when_that_would_not_do():
    pool, cache = cached(num_pages=5)
    enter(pool, cache, [1, 2, 3, 4])
    assert cache.take(5) is None
    assert cache.num_pages == 2
    assert len(cache.take(3)) == 3
    assert cache.num_pages == 1


def test_taking_evicts_nothing_when_pages_before_held_ones_would_be_needed():
    """A page that two sequences computed is the first one's in the tree, and what the second computed follows it."""
    pool, cache = cached(num_pages=6)
    (shared,) = enter(pool, cache, [1, 2])
    (unused,) = enter(pool, cache, [9, 9])
    mine = pool.take(2)
    cache.publish("", [1, 2, 3, 4], mine)
    cache.check()
    assert pool.num_free == 1
    assert cache.num_available == 2
    assert cache.take(3) is None
    assert cache.match("", [9, 9], 1).pages == [unused]
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
    assert cache.num_pages == 1
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
    place = None
    for count in range(1, 101):
        place = cache.publish("", tokens, pages[:count], place)
    assert tokens.looks == 100
    assert cache.match("", range(200), 100).pages == pages


def test_a_match_goes_on_from_where_it_was_and_begins_again_when_that_was_evicted():
    pool, cache = cached()
    tokens = CountedTokens(range(10))
    first = enter(pool, cache, list(range(6)))
    match = cache.match("", tokens, 5)
    assert match.pages == first
    looks = tokens.looks
    assert cache.match("", tokens, 5, match).pages == first
    assert tokens.looks == looks + 1, "only the page that was missing is looked for"
    cache.evict(3)
    second = enter(pool, cache, list(range(8)))
    assert cache.match("", tokens, 5, match).pages == second


def test_what_was_evicted_after_it_was_published_is_entered_anew():
    """A page computed twice is not the tree's: the tree's can go while the second computer still runs."""
    pool, cache = cached()
    enter(pool, cache, [1, 2])
    mine = pool.take(2)
    place = cache.publish("", [1, 2], mine[:1])
    assert cache.evict(1) == 1
    cache.publish("", [1, 2, 3, 4], mine, place)
    cache.check()
    assert cache.match("", [1, 2, 3, 4], 2).pages == mine


def test_any_text_can_be_a_salt():
    pool, cache = cached()
    for salt in ("", "é", "\ud800", "\x00"):
        pages = enter(pool, cache, [1, 2], salt=salt)
        assert cache.match(salt, [1, 2], 1).pages == pages
    assert cache.evict(9) == 4
    assert not cache._roots


class Trees(RuleBasedStateMachine):
    """Sequences come with tokens, compute them, publish, and leave in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # what was last computed into each page
        self.running: list[tuple[str, list[int], list[int]]] = []
        self.places: dict[int, Place] = {}  # of those that run, by id(): up to where each has published
        self.waiting: list[tuple[str, list[int], Match | None]] = []
        self.used: dict[tuple[str, tuple[int, ...]], int] = {}  # when each prefix was last matched or published
        self.now = 0

    @initialize(num_pages=st.integers(4, 20), page_size=st.integers(1, 3))
    def start(self, num_pages, page_size):
        self.pool = PagePool(num_pages)
        self.cache = PrefixCache(self.pool, page_size)
        self.page_size = page_size

    @rule(salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, salt, tokens):
        self._begin(salt, tokens, None)

    @rule(salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def look(self, salt, tokens):
        """Wait with what was found, to go on from there later."""
        match = self.cache.match(salt, tokens, len(tokens) // self.page_size)
        self._touch(salt, tokens, len(match.pages))
        self.waiting.append((salt, tokens, match))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def begin_what_waited(self, data):
        self._begin(*self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    def _begin(self, salt, tokens, known):
        total = len(tokens) // self.page_size
        matched = self.cache.match(salt, tokens, total, known).pages
        assert matched == self.cache.match(salt, tokens, total).pages
        self._touch(salt, tokens, len(matched))
        for index, page in enumerate(matched):
            prefix = tuple(tokens[: (index + 1) * self.page_size])
            assert self.content[page] == (salt, prefix), "a page was found under tokens it was not computed from"
        self.cache.hold(matched)
        available, evicted = self.cache.num_available, self.cache.num_evicted
        taken = self.cache.take(total - len(matched))
        assert (taken is None) == (total - len(matched) > available)
        if taken is None:
            assert self.cache.num_evicted == evicted, "pages were evicted for nothing"
            self.cache.release(matched)
        else:
            for index, page in enumerate(taken, start=len(matched)):
                self.content[page] = salt, tuple(tokens[: (index + 1) * self.page_size])
            self.running.append((salt, tokens, matched + taken))
        self.check()

    def _touch(self, salt: str, tokens: list[int], num_pages: int) -> None:
        self.now += 1
        for count in range(1, num_pages + 1):
            self.used[salt, tuple(tokens[: count * self.page_size])] = self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data(), publish=st.booleans())
    def end(self, data, publish):
        salt, tokens, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        place = self.places.pop(id(pages), None)
        if publish:
            self._publish(salt, tokens, pages, place)
        self.cache.release(pages)
        self.check()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish_some(self, data):
        salt, tokens, pages = data.draw(st.sampled_from(self.running))
        place = self.places.get(id(pages))
        count = data.draw(st.integers(place.num_pages if place else 0, len(pages)))
        self.places[id(pages)] = self._publish(salt, tokens, pages[:count], place)
        self.check()

    def _publish(self, salt, tokens, pages, known):
        place = self.cache.publish(salt, tokens, pages, known)
        assert place.num_pages == len(self.cache.match(salt, tokens, len(pages)).pages) == len(pages)
        self._touch(salt, tokens, len(pages))
        return place

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        before, cached = self.pool.num_free, list(self.cache.pages())
        possible = self.cache.num_available - before
        freed = self.cache.evict(count)
        assert freed == min(count, possible)
        assert self.pool.num_free == before + freed <= before + count
        gone = [page for page in cached if not self.pool.holders(page)]
        left = [page for page in self.cache.pages() if self.pool.holders(page) == 1 and self._is_last(page)]
        if gone and left:
            newest = max(self.used[self.content[page]] for page in gone)
            assert newest <= min(self.used[self.content[page]] for page in left), "a page went before an older one"
        if freed < count and not self.running:
            assert self.cache.num_pages == 0, "pages that nobody uses were not evicted"
        self.check()

    def _is_last(self, page: int) -> bool:
        """Whether nothing in the tree follows what stands in `page`."""
        salt, tokens = self.content[page]
        others = [self.content[other] for other in self.cache.pages() if other != page]
        return not any(where == salt and prefix[: len(tokens)] == tokens for where, prefix in others)

    @rule(salt=st.sampled_from("ab"))
    def drop(self, salt):
        self.cache.drop(salt)
        assert not self.cache.match(salt, [0] * 12, 12).pages
        self.check()

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
        held = [page for _, _, pages in self.running for page in pages]
        for page in range(1, self.pool.num_pages):
            expected = held.count(page) + (page in set(self.cache.pages()))
            assert self.pool.holders(page) == expected


Trees.TestCase.settings = settings(settings.default, stateful_step_count=40)
TestTrees = Trees.TestCase
