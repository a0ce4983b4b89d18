"""Computed pages by the tokens they were computed from."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from quire.core.host_tier import HostTier, Restore
from quire.core.lazy_heap import LazyHeap
from quire.core.page_pool import PagePool
from quire.core.prefix_tree import TOKEN_BYTES, Node, decoded, encoded, packed, page_keys, partial_page_after
from quire.core.snapshots import Snapshots
from quire.reach import ChunkReach, Reach, first_page

Window = tuple[int, int | ChunkReach]  # a page group, and the positions that it reads


class PrefixCursor(NamedTuple):
    """The end of a prefix in the tree: the node of its last page, or the salt for the empty prefix.

    Holds for as long as the node is in the tree, since what precedes a node leaves after it.
    """

    end: Node | str
    num_pages: int  # in each group that reads all positions


class Match(NamedTuple):
    """A prefix of tokens in the cache. Every group has what going on after `cursor` reads."""

    cursor: PrefixCursor
    path: list[Node]  # at least the nodes up to the cursor
    partial_page: Node | None = None  # a page after the cursor; its first `num_partial_tokens` are the next tokens
    num_partial_tokens: int = 0
    restore: Restore | None = None  # pages after the cursor that are on the host

    def num_tokens(self, page_size: int) -> int:
        """Tokens that need not be computed."""
        num_pages = self.cursor.num_pages if self.restore is None else self.restore.end
        return num_pages * page_size + self.num_partial_tokens

    @property
    def has_state(self) -> bool:
        """False where slots have state beside pages, and that at its end is gone since it was found."""
        return not isinstance(self.cursor.end, Node) or bool(self.cursor.end.snapshot)

    def end_pages(self) -> list[int]:
        """The pages of the node at its end, which has the snapshot where there are any."""
        return [page for page in self.cursor.end.pages if page] if isinstance(self.cursor.end, Node) else []


class PrefixCache:
    """A radix tree from token prefixes to pages, one node for each page of tokens, with one root for each salt.

    The tree is one holder of each of its pages and each running sequence another. A page is in the tree at most once.
    A full group (one that reads all positions) has a page in every node. Its page can be evicted when only the tree
    holds it and nothing in the tree follows; the node and its other pages go with it. The page of a window group (that
    reads the last positions, or those of a chunk) can be evicted whenever only the tree holds it, since a prefix that
    ends later does without. Every page that can be evicted now is among `_candidates`. Sequences hold and release pages
    through the cache, so that it sees when it is the last holder. Owned by the engine thread.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        groups: Sequence[Reach] = (None,),
        host: HostTier | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`groups`: the positions that each page group reads. `host` is offered the pages that are evicted.
        `snapshots`: a prefix ends with one, where slots have state beside pages."""
        self._pool = pool
        self._snapshots = snapshots
        self._host = host
        self._page_size = page_size
        self._is_full = [reach is None for reach in groups]
        self._num_full = sum(self._is_full)
        self._windows = [(group, reach) for group, reach in enumerate(groups) if reach is not None]
        self._roots: dict[str, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._candidates: LazyHeap[int] = LazyHeap()  # pages by their last use when they were listed
        self._now = 0
        self.num_evictable = 0  # pages that eviction could free, one after the other
        self.num_evicted = 0  # since the start

    @property
    def num_available(self) -> int:
        """Pages that are free or that eviction can free."""
        return self._pool.num_free + self.num_evictable

    def pages(self) -> Iterable[int]:
        return self._node_of.keys()

    def match(self, salt: str, tokens: Sequence[int], max_tokens: int, known: Match | None = None) -> Match:
        """The longest cached prefix of `tokens`, at most `max_tokens` long. The caller holds the pages it uses.

        `known` is the result of an earlier search for the same prefix. It is continued where it still holds, so that a
        sequence that waits costs little each time it is looked at.
        """
        self._now += 1
        path = [] if known is None else known.path
        while path and path[-1].parent is None:
            path.pop()
        node = path[-1] if path else self._roots.get(salt)
        if node is None:
            return Match(PrefixCursor(salt, 0), path)
        max_pages = max_tokens // self._page_size
        for key in page_keys(tokens, len(path), max_pages, self._page_size):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        num_pages = num_usable_pages(path, self._page_size, self._windows, self._snapshots is not None)
        if num_pages:
            node = path[num_pages - 1]
            self._touch(node, num_pages)
        elif path:
            node = self._roots[salt]
        if self._snapshots is not None:
            if num_pages:
                self._snapshots.touch(node)
            return Match(PrefixCursor(node if num_pages else salt, num_pages), path)
        start = num_pages * self._page_size
        next_tokens = packed(tokens[start : min(start + self._page_size, max_tokens)])
        partial_page, num_tokens = partial_page_after(node, next_tokens, max(1, self._page_size // 2))
        return Match(PrefixCursor(node if num_pages else salt, num_pages), path, partial_page, num_tokens)

    def tables(self, match: Match) -> list[list[int]]:
        """The pages of a match by group, 0 for those that going on after it, and what is restored, does not read."""
        count = match.cursor.num_pages
        end = count if match.restore is None else match.restore.end
        tables = [[node.pages[group] for node in islice(match.path, count)] for group in range(len(self._is_full))]
        for group, reach in self._windows:
            unread = min(count, first_page(reach, end * self._page_size, self._page_size))
            tables[group][:unread] = [0] * unread
        return tables

    def publish(
        self,
        salt: str,
        tokens: Sequence[int],
        tables: Sequence[Sequence[int]],
        num_pages: int,
        known: PrefixCursor | None = None,
        digests: Sequence[bytes] = (),
    ) -> PrefixCursor:
        """Enter the first `num_pages` of each group's table, which hold exactly these computed tokens.

        The caller holds them. Where the tree has a page for the same tokens already it keeps its own. Returns the end
        of what the tree has. Up to `known`, the result of an earlier call for the same prefix, there is nothing to do
        where that still holds. `digests`: those of the first pages, where they are known.
        """
        while num_pages and not any(table[num_pages - 1] for table in tables):
            num_pages -= 1  # given back: nothing to enter, and nothing that follows
        if known is not None and isinstance(known.end, Node) and known.end.parent is not None:
            node, first = known.end, known.num_pages
        elif num_pages:
            first = 0
            node = self._roots.get(salt) or self._roots.setdefault(salt, Node(encoded(salt), None, []))
        else:
            return PrefixCursor(salt, 0)
        self._now += 1
        for index, key in enumerate(page_keys(tokens, first, num_pages, self._page_size), start=first):
            child = node.children.get(key)
            if child is None:
                child = self._enter(key, node)
                if index < len(digests):
                    child.known_digest = digests[index]
            for group, table in enumerate(tables):
                if table[index] and not child.pages[group]:
                    self._add_page(child, group, table[index])
            node = child
        num_pages = max(first, num_pages)
        self._touch(node, num_pages)
        return PrefixCursor(node, num_pages)

    def hold(self, pages: Iterable[int]) -> None:
        node_of = self._node_of
        for page in self._pool.hold(pages):
            if (node := node_of.get(page)) is not None:
                if self._is_full[node.pages.index(page)]:
                    self._pin(node)
                else:
                    self.num_evictable -= 1

    def release(self, pages: Iterable[int]) -> None:
        """Give up a sequence's hold; what the tree still holds stays for others to match."""
        node_of = self._node_of
        for page in self._pool.release(pages):
            if (node := node_of.get(page)) is not None:
                group = node.pages.index(page)
                if self._is_full[group]:
                    self._unpin(node)
                else:
                    self.num_evictable += 1
                self._list(node, group)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, evicting for the shortage; None, and nothing evicted, when that would not be enough."""
        pages = self._pool.take(count)
        if pages is None and count <= self.num_available:
            self.evict(count - self._pool.num_free)
            pages = self._pool.take(count)
        return pages

    def deduplicate(self, cursor: PrefixCursor, tables: Sequence[Sequence[int]]) -> int:
        """Put the pages of a sequence, which has published up to `cursor`, in place of those of the same tokens that
        only the tree holds and its own keep from being evicted. Returns the number of pages freed."""
        before = self._pool.num_free
        node, index = cursor.end, cursor.num_pages
        while isinstance(node, Node) and node.parent is not None:
            index -= 1
            for group, table in enumerate(tables):
                page = node.pages[group]
                is_double = self._is_full[group] and page != table[index] and self._pool.holders(page) == 1
                if is_double and node.pins:
                    self._pool.release((self._drop_page(node, group),))
                    self._add_page(node, group, table[index])
            node = node.parent
        return self._pool.num_free - before

    def evict(self, count: int) -> int:
        """Free `count` pages or a few more, least recently used first and from the ends of prefixes; returns the number
        freed. It is less than `count` only when nothing is left to evict."""
        before = self._pool.num_free
        goal = before + count
        while self._pool.num_free < goal and (first := self._candidates.peek()) is not None:
            last_used, page = first
            self._candidates.discard(page)
            node = self._node_of[page]
            group = node.pages.index(page)
            if self._pool.holders(page) > 1 or (self._is_full[group] and (node.children or node.pins)):
                continue  # it is listed again when its last child goes or its last holder lets go
            if last_used < node.last_used:
                self._list(node, group)
            elif self._is_full[group]:
                self._evict_end(node, goal)
            else:
                if self._host is not None:
                    self._host.save(node, (group,))
                dropped = [self._drop_page(node, group)]
                if not node.children and not any(node.pages):
                    self._list_end(self._remove(node, dropped))
                self._pool.release(dropped)
        freed = self._pool.num_free - before
        self.num_evicted += freed
        return freed

    def _evict_end(self, node: Node, goal: int) -> None:
        """Evict the end of a prefix, and what is then its end, until so many pages are free or others are to go first:
        a prefix is not listed and looked up again for each of its pages."""
        groups, count, first = range(len(node.pages)), goal - self._pool.num_free, self._candidates.peek()
        dropped: list[int] = []
        end: Node | None = node
        while end is not None and not end.pins:
            if len(dropped) >= count or (dropped and first is not None and first[0] <= end.last_used):
                self._list_end(end)
                break
            if self._host is not None:
                self._host.save(end, groups)
            end = self._remove(end, dropped)
        self._pool.release(dropped)

    def drop(self, salt: str) -> None:
        """Forget everything under `salt`."""
        root = self._roots.pop(salt, None)
        if root is not None:
            dropped: list[int] = []
            for node in list(root.below()):
                self._forget(node, dropped)
            self._pool.release(dropped)

    def clear(self) -> None:
        """Forget everything: the contents of the pages are lost."""
        for salt in list(self._roots):
            self.drop(salt)

    def _touch(self, node: Node, num_pages: int) -> None:
        """A prefix of `num_pages` that ends with `node` was used: its end, and what going on after it reads."""
        end = num_pages * self._page_size
        first = min((first_page(reach, end, self._page_size) for _, reach in self._windows), default=num_pages)
        for _ in range(max(1, num_pages - first)):
            node.last_used = self._now
            if node.parent is None or node.parent.parent is None:
                return
            node = node.parent

    def _enter(self, key: bytes, parent: Node) -> Node:
        """A node after `parent`, of which a sequence holds the pages of full groups; they are added next."""
        node = parent.children[key] = Node(key, parent, [0] * len(self._is_full))
        node.last_used = self._now
        self.num_evictable += self._num_full
        return node

    def _add_page(self, node: Node, group: int, page: int) -> None:
        """The tree holds `page` in addition to the sequence that computed it."""
        if page in self._node_of:
            raise ValueError(f"page {page} is in the tree under other tokens")
        node.pages[group] = page
        self._node_of[page] = node
        self._pool.hold((page,))
        if self._is_full[group]:
            self._pin(node)

    def _pin(self, node: Node) -> None:
        """Something more keeps `node` in the tree; the first such thing is one that keeps its parent."""
        node.pins += 1
        while node.pins == 1 and node.parent is not None:
            self.num_evictable -= self._num_full
            node = node.parent
            node.pins += 1

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        while not node.pins and node.parent is not None:
            self.num_evictable += self._num_full
            node = node.parent
            node.pins -= 1

    def _list(self, node: Node, group: int) -> None:
        """The page of `group` can be evicted now, unless something keeps its node. Nodes are listed by one page."""
        if self._is_full[group]:
            if node.children or node.pins:
                return
            group = self._is_full.index(True)
        if node.pages[group] not in self._candidates:
            self._candidates.push(node.last_used, node.pages[group])

    def _list_end(self, node: Node | None) -> None:
        """`node` is the end of a prefix now, as `_remove` tells."""
        if node is not None and self._num_full:
            self._list(node, self._is_full.index(True))

    def _remove(self, node: Node, dropped: list[int]) -> Node | None:
        """Take a leaf out of the tree, and those before it that are left without pages and children. Returns the node
        before them if that is a leaf now, which is to be listed. Their pages are added to `dropped`, which the tree
        still holds."""
        while True:
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            # A sequence that uses a page uses those before it, but only the last ones are touched at the time.
            parent.last_used = max(parent.last_used, node.last_used)
            self._forget(node, dropped)
            if parent.children:
                return None
            if parent.parent is None:
                del self._roots[decoded(parent.key)]
                return None
            if any(parent.pages):
                return parent
            node = parent

    def _forget(self, node: Node, dropped: list[int]) -> None:
        if self._snapshots is not None:
            self._snapshots.drop(node)
        if not node.pins:
            self.num_evictable -= self._num_full
        for group, page in enumerate(node.pages):
            if page:
                dropped.append(self._drop_page(node, group))
        node.parent = None

    def _drop_page(self, node: Node, group: int) -> int:
        """Take a page out of the tree. Returns it: the tree still holds it."""
        page = node.pages[group]
        if not self._is_full[group] and self._pool.holders(page) == 1:
            self.num_evictable -= 1
        node.pages[group] = 0
        del self._node_of[page]
        self._candidates.discard(page)
        return page

    # Accounts

    def count_evictable(self) -> int:
        """The correct `num_evictable` of the cache, counted over all pages."""
        pinned: set[Node] = set()
        count = 0
        for page, held in self._node_of.items():
            in_full_group = self._is_full[held.pages.index(page)]
            count += not in_full_group and self._pool.holders(page) == 1
            node: Node | None = held if in_full_group and self._pool.holders(page) > 1 else None
            while node is not None and node not in pinned:
                pinned.add(node)
                node = node.parent
        return count + sum(self._num_full for node in set(self._node_of.values()) if node not in pinned)

    def check(self) -> None:
        """Assert every invariant of the prefix self."""
        seen: dict[int, Node] = {}
        for salt, root in self._roots.items():
            assert root.children, f"the root of {salt!r} is empty and was not removed"
            for node in root.below():
                assert len(node.key) == TOKEN_BYTES * self._page_size, "a page with a part of its tokens is in the tree"
                assert all(child.parent is node for child in node.children.values())
                assert node.children or any(node.pages), "the tree has a branch without pages"
                missing = [full for full, page in zip(self._is_full, node.pages, strict=True) if not page]
                assert not any(missing), "a node has no page of a full group"
                for group, page in enumerate(node.pages):
                    if not page:
                        continue
                    assert page not in seen, f"page {page} is in the tree twice"
                    seen[page] = node
                    assert self._pool.holders(page) >= 1, f"page {page} is in the tree and free"
                    kept = self._pool.holders(page) > 1
                    if self._is_full[group]:
                        kept = bool(node.children or node.pins or group != self._is_full.index(True))
                    assert kept or page in self._candidates, f"page {page} can be evicted and is not listed"
        assert seen == self._node_of, "the index and the tree differ"
        assert set(self._candidates) <= seen.keys(), "a page is listed that is not in the tree"
        counted = self.count_evictable()
        assert counted == self.num_evictable, f"{counted} pages can be evicted, {self.num_evictable} are counted"


def num_usable_pages(path: list[Node], page_size: int, windows: Sequence[Window], with_state: bool) -> int:
    """The most nodes of `path` after which every window group has what going on reads, and slots their state, where
    they have any beside pages."""
    count = len(path)
    while True:
        while with_state and count and not path[count - 1].snapshot:
            count -= 1
        for group, reach in windows:
            needed = range(first_page(reach, count * page_size, page_size), count)
            missing = next((n for n in needed if not path[n].pages[group]), None)
            if missing is not None:
                count = missing
                break
        else:
            return count
