"""The tree against a dictionary of prefixes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quire.core.page_pool import PagePool
from quire.core.prefix_cache import Match, PrefixCache, PrefixCursor
from quire.core.prefix_tree import Node, packed
from quire.core.snapshots import Snapshots
from quire.reach import ChunkReach, Reach
from tests.fake_executor import is_read

GROUPS = [
    (None,),
    (None,),
    (3,),
    (None, 3),
    (None, 2, 6),
    (None, None),
    (4, 2),
    (ChunkReach(4),),
    (None, ChunkReach(5), 3),
]


class Trees(RuleBasedStateMachine):
    """Sequences come with tokens, compute them, publish, give back what their windows leave, and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, tuple[str, tuple[int, ...], int]] = {}  # what was last computed into each page
        self.running: list[tuple[str, list[int], list[list[int]]]] = []
        self.cursors: dict[int, PrefixCursor] = {}  # of those that run, by id(): the end of what each has published
        self.waiting: list[tuple[str, list[int], Match | None]] = []
        self.used: dict[tuple[str, tuple[int, ...]], int] = {}  # when each prefix was last matched or published
        self.now = 0
        self.states: dict[int, tuple[str, tuple[int, ...]]] = {}  # what was last saved to each snapshot
        self.saved: list[int] = []  # those that prefixes have, the least recently used first

    @initialize(
        num_pages=st.integers(4, 30),
        page_size=st.integers(1, 3),
        groups=st.sampled_from(GROUPS),
        num_snapshots=st.sampled_from([None, None, 2, 6]),
    )
    def start(self, num_pages, page_size, groups, num_snapshots):
        self.pool = PagePool(num_pages)
        self.snapshots = None if num_snapshots is None else Snapshots(num_snapshots)
        self.cache = PrefixCache(self.pool, page_size, groups, snapshots=self.snapshots)
        self.page_size = page_size
        self.groups = groups

    @rule(salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def begin(self, salt, tokens):
        self._begin(salt, tokens, None)

    @rule(salt=st.sampled_from("ab"), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def look(self, salt, tokens):
        """Wait with what was found, to go on from there later."""
        match = self.cache.match(salt, tokens, len(tokens))
        self._touch(salt, tokens, match.cursor.num_pages)
        self._touch_state(salt, tokens, match.cursor.num_pages)
        self.waiting.append((salt, tokens, match))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def begin_what_waited(self, data):
        self._begin(*self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))

    def _prefix(self, tokens: list[int], index: int) -> tuple[int, ...]:
        """The tokens of the page of this index, and all before them."""
        return tuple(tokens[: (index + 1) * self.page_size])

    def _first_read(self, reach: Reach, num_pages: int) -> int:
        """The first page that going on after so many reads."""
        position = num_pages * self.page_size
        return min(at for at in range(position + 1) if is_read(reach, at, position)) // self.page_size

    def _longest(self, salt: str, tokens: list[int]) -> int:
        """The number of pages after which every group can go on, by what is in the cache. Where a chunk begins no page
        is read, but one of this prefix or of a longer one must be there."""
        there = {self.content[page] for page in self.cache.pages()}
        begun = [prefix for its_salt, prefix, _ in there if its_salt == salt]
        total = len(tokens) // self.page_size
        for count in range(total, 0, -1):
            firsts = [(group, self._first_read(window, count)) for group, window in enumerate(self.groups)]
            wanted = [(salt, self._prefix(tokens, n), group) for group, first in firsts for n in range(first, count)]
            own = self._prefix(tokens, count - 1)
            is_there = there.issuperset(wanted) and any(prefix[: len(own)] == own for prefix in begun)
            if is_there and self._has_state(salt, own):
                return count
        return 0

    def _touch_state(self, salt: str, tokens: list[int], num_pages: int) -> None:
        ends_with = salt, self._prefix(tokens, num_pages - 1)
        self.saved.sort(key=lambda number: self.states[number] == ends_with)

    def _has_state(self, salt: str, prefix: tuple[int, ...]) -> bool:
        return self.snapshots is None or any(self.states[number] == (salt, prefix) for number in self.saved)

    @precondition(lambda self: self.snapshots is not None and self.cursors)
    @rule(data=st.data(), is_lost=st.booleans())
    def save(self, data, is_lost):
        """The state at the end of a page that a sequence has published."""
        salt, tokens, tables = data.draw(st.sampled_from([one for one in self.running if id(one[2]) in self.cursors]))
        count = data.draw(st.integers(0, self.cursors[id(tables)].num_pages))
        number = self.snapshots.take()
        if number in self.saved:
            assert number == self.saved.pop(0), "a snapshot was given up that was used later than another"
        node, at = self.cache._roots.get(salt), 0
        while node is not None and at < count:
            node = node.children.get(packed(tokens[at * self.page_size : (at + 1) * self.page_size]))
            at += 1
        if is_lost or node is None or not count:
            self.snapshots.abandon(number)
        else:
            is_first = not self._has_state(salt, self._prefix(tokens, count - 1))
            assert self.snapshots.enter(number, node) == is_first
            if is_first:
                self.states[number] = salt, self._prefix(tokens, count - 1)
                self.saved.append(number)
        self.check()

    @precondition(lambda self: self.snapshots is not None and self.cursors)
    @rule(data=st.data())
    def deduplicate(self, data):
        """After it a sequence keeps no page from being evicted that stands for the same tokens as its own."""
        _, _, tables = data.draw(st.sampled_from([one for one in self.running if id(one[2]) in self.cursors]))
        before, cursor = self.cache.num_available, self.cursors[id(tables)]
        freed = self.cache.deduplicate(cursor, tables)
        assert self.cache.num_available == before + freed
        node, index = cursor.end, cursor.num_pages - 1
        while not isinstance(node, str) and node.parent is not None:
            for group, window in enumerate(self.groups):
                if window is None and node.pins and node.pages[group] != tables[group][index]:
                    assert self.pool.holders(node.pages[group]) > 1
            node, index = node.parent, index - 1
        self.check()

    def _begin(self, salt, tokens, known):
        total = len(tokens) // self.page_size
        match = self.cache.match(salt, tokens, len(tokens), known)
        count = match.cursor.num_pages
        tables = self.cache.tables(match)
        again = self.cache.match(salt, tokens, len(tokens))
        assert (again.cursor, self.cache.tables(again)) == (match.cursor, tables)
        assert count == self._longest(salt, tokens)
        self._touch(salt, tokens, count)
        self._touch_state(salt, tokens, count)
        if self.snapshots is not None and count:
            assert self.states[match.cursor.end.snapshot] == (salt, self._prefix(tokens, count - 1))
        for group, window in enumerate(self.groups):
            first = self._first_read(window, count)
            assert len(tables[group]) == count
            assert not any(tables[group][:first])
            for index in range(first, count):
                content = salt, self._prefix(tokens, index), group
                assert self.content[tables[group][index]] == content, "a page was found that is not what it should be"
        matched = [page for table in tables for page in table if page]
        self.cache.hold(matched)
        available, evicted = self.cache.num_available, self.cache.num_evicted
        num_missing = (total - count) * len(self.groups)
        taken = self.cache.take(num_missing)
        assert (taken is None) == (num_missing > available)
        if taken is None:
            assert self.cache.num_evicted == evicted, "pages were evicted for nothing"
            self.cache.release(matched)
        else:
            for group, table in enumerate(tables):
                for page in taken[group :: len(tables)]:
                    self.content[page] = salt, self._prefix(tokens, len(table)), group
                    table.append(page)
            self.running.append((salt, tokens, tables))
            if any(0 in table for table in tables):  # it has not what it would take to publish less than it began with
                self.cursors[id(tables)] = match.cursor
        self.check()

    def _touch(self, salt: str, tokens: list[int], num_pages: int) -> None:
        self.now += 1
        for index in range(num_pages):
            self.used[salt, self._prefix(tokens, index)] = self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data(), publish=st.booleans())
    def end(self, data, publish):
        salt, tokens, tables = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        cursor = self.cursors.pop(id(tables), None)
        if publish:
            self._publish(salt, tokens, tables, len(tables[0]), cursor)
        self.cache.release(page for table in tables for page in table if page)
        self.check()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), gives_back=st.booleans())
    def publish_some(self, data, gives_back):
        salt, tokens, tables = data.draw(st.sampled_from(self.running))
        cursor = self.cursors.get(id(tables))
        count = data.draw(st.integers(cursor.num_pages if cursor else 0, len(tables[0])))
        self.cursors[id(tables)] = self._publish(salt, tokens, tables, count, cursor)
        for table, window in zip(tables, self.groups, strict=True):
            if gives_back and window is not None:
                first = self._first_read(window, count)
                self.cache.release(page for page in table[:first] if page)
                table[:first] = [0] * first
        self.check()

    def _publish(self, salt, tokens, tables, count, known):
        # Pages at the end may all be given back. Then the tree has them from before, or it was cleared since.
        is_known = known is not None and isinstance(known.end, Node) and known.end.parent is not None
        held = max((index + 1 for table in tables for index in range(count) if table[index]), default=0)
        cursor = self.cache.publish(salt, tokens, tables, count, known)
        self.now += 1
        found = self.cache.match(salt, tokens, count * self.page_size).cursor.num_pages
        self._touch_state(salt, tokens, found)
        assert cursor.num_pages == max(held, known.num_pages if is_known else 0)
        # Where the tree had a page of its own that was evicted since, the sequence's stays private.
        assert found == self._longest(salt, tokens[: count * self.page_size])
        assert found == count or any(self.groups) or self.snapshots is not None
        self._touch(salt, tokens, count)
        return cursor

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        before, cached = self.pool.num_free, list(self.cache.pages())
        possible = self.cache.num_available - before
        freed = self.cache.evict(count)
        assert min(count, possible) <= freed <= min(count + len(self.groups) - 1, possible)
        assert self.pool.num_free == before + freed
        if self.groups == (None,):
            gone = [page for page in cached if not self.pool.holders(page)]
            left = [page for page in self.cache.pages() if self.pool.holders(page) == 1 and self._is_last(page)]
            if gone and left:
                newest = max(self.used[self.content[page][:2]] for page in gone)
                assert newest <= min(self.used[self.content[page][:2]] for page in left), "an older page was kept"
        if freed < count and not self.running:
            assert not self.cache.pages(), "pages that no sequence uses were not evicted"
        self.check()

    def _is_last(self, page: int) -> bool:
        """Whether nothing in the tree follows what stands in `page`."""
        salt, tokens, _ = self.content[page]
        others = [self.content[other] for other in self.cache.pages() if other != page]
        return not any(where == salt and prefix[: len(tokens)] == tokens for where, prefix, _ in others)

    @rule(salt=st.sampled_from("ab"))
    def drop(self, salt):
        self.cache.drop(salt)
        assert not self.cache.match(salt, [0] * 12, 12).cursor.num_pages
        self.check()

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
        if self.snapshots is not None:
            self.snapshots.check()
            assert self.snapshots.is_balanced
            self.saved = [number for number in self.saved if number in self.snapshots._node_of]
            assert set(self.saved) == self.snapshots._node_of.keys()
        held = [page for _, _, tables in self.running for table in tables for page in table]
        for page in range(1, self.pool.num_pages):
            expected = held.count(page) + (page in set(self.cache.pages()))
            assert self.pool.holders(page) == expected


Trees.TestCase.settings = settings(settings.default, stateful_step_count=40)
TestTrees = Trees.TestCase
