"""Computed pages by the tokens they were computed from."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from quire.core.page_pool import PagePool

ROOT_PAGE = 0  # roots stand for the empty prefix and have no page of their own
TOKEN_TYPE = "i"  # tokens are packed as C ints, so that a page's key is compared as a block of bytes
TOKEN_BYTES = array(TOKEN_TYPE).itemsize


class Node:
    """One page in the tree: its tokens are `key`, and the tokens before it are those on the path from the root.

    A root's key is its salt.
    """

    __slots__ = ("children", "key", "last_used", "listed", "page", "parent", "pins")

    def __init__(self, page: int, key: bytes, parent: "Node | None") -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.last_used = 0  # or one of those after it, if that is later
        self.listed = False  # among the candidates for eviction
        self.pins = 0  # what keeps it in the tree: a sequence that holds its page, and each child that is pinned


class Place(NamedTuple):
    """Where in the tree a prefix ends: the node of its last page, or the salt for the empty prefix.

    Holds for as long as the node is in the tree, since what precedes a node leaves after it.
    """

    end: Node | str
    num_pages: int


class Match(NamedTuple):
    pages: list[int]
    place: Place


class PrefixCache:
    """A radix tree from token prefixes to pages, one page to an edge, with one root for each salt.

    The tree is one holder of each of its pages and each running sequence another. A page is in the tree at most once.
    A page can be evicted when only the tree holds it and nothing in the tree follows it; every such page is among
    `_candidates`. One that a held page follows, which another sequence computed as well, is pinned until that goes.
    Sequences hold and release pages through the cache, so that it sees when it is the last holder.
    Owned by the engine thread.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._candidates: list[tuple[int, int, Node]] = []  # a heap by last use; entries may be out of date
        self._now = 0
        self.num_evictable = 0  # pages that only the tree holds, and with them all that follows
        self.num_evicted = 0  # since the start

    @property
    def num_pages(self) -> int:
        return len(self._node_of)

    @property
    def num_available(self) -> int:
        """Pages that are free or that eviction can free."""
        return self._pool.num_free + self.num_evictable

    def pages(self) -> Iterable[int]:
        return self._node_of.keys()

    def match(self, salt: str, tokens: Sequence[int], max_pages: int, known: Match | None = None) -> Match:
        """The longest cached prefix of `tokens`, at most `max_pages` long. The caller holds the pages it uses.

        `known` is what an earlier search for the same prefix found. It is continued where it still holds, so that a
        sequence that waits costs little each time it is looked at.
        """
        self._now += 1
        node = self._roots.get(salt)
        pages: list[int] = []
        if known is not None and self._holds(known.place):
            assert isinstance(known.place.end, Node)
            node, pages = known.place.end, known.pages
        if node is None:
            return Match(pages, Place(salt, 0))
        while len(pages) < max_pages:
            child = node.children.get(self.key_after(tokens, len(pages)))
            if child is None:
                break
            pages.append(child.page)
            node = child
        if not pages:
            return Match(pages, Place(salt, 0))
        node.last_used = self._now
        return Match(pages, Place(node, len(pages)))

    def publish(self, salt: str, tokens: Sequence[int], pages: Sequence[int], known: Place | None = None) -> Place:
        """Enter `pages`, which hold exactly these computed tokens; the caller holds them.

        Where the tree has a page for the same tokens already it keeps its own. Returns where the last page stands.
        Up to `known`, the answer to an earlier call for the same prefix, there is nothing to do where that still holds.
        """
        if not pages:
            return Place(salt, 0)
        self._now += 1
        if known is not None and self._holds(known):
            assert isinstance(known.end, Node)
            node, first = known.end, known.num_pages
        else:
            first = 0
            node = self._roots.get(salt) or self._roots.setdefault(salt, Node(ROOT_PAGE, _encoded(salt), None))
        size = self._page_size
        packed = array(TOKEN_TYPE, tokens[first * size : len(pages) * size]).tobytes()  # all at once: they are many
        for index, page in enumerate(pages[first:]):
            key = packed[index * size * TOKEN_BYTES : (index + 1) * size * TOKEN_BYTES]
            node = node.children.get(key) or self._enter(page, key, node)
        node.last_used = self._now
        return Place(node, len(pages))

    def key_after(self, tokens: Sequence[int], num_pages: int) -> bytes:
        """The tokens of the page after the first `num_pages`, as the tree keys them; cut short where they end."""
        start = num_pages * self._page_size
        return array(TOKEN_TYPE, tokens[start : start + self._page_size]).tobytes()

    def hold(self, pages: Sequence[int]) -> None:
        self._pool.hold(pages)
        for page in pages:
            if self._pool.holders(page) == 2 and (node := self._node_of.get(page)) is not None:
                self._pin(node)

    def release(self, pages: Sequence[int]) -> None:
        """Give up a sequence's hold; what the tree still holds stays for others to match."""
        self._pool.release(pages)
        for page in pages:
            if self._pool.holders(page) == 1:
                node = self._node_of.get(page)
                if node is not None:
                    self._unpin(node)
                    self._list(node)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, evicting for the shortage; None, and nothing evicted, when that would not be enough."""
        if count > self.num_available:
            return None
        shortage = count - self._pool.num_free
        if shortage > 0:
            self.evict(shortage)
        return self._pool.take(count)

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used first and from the ends of prefixes. Returns how many."""
        freed = 0
        while freed < count and self._candidates:
            last_used, _, node = heappop(self._candidates)
            node.listed = False
            if node.children or self._node_of.get(node.page) is not node or self._pool.holders(node.page) > 1:
                continue  # it is listed again when its last child goes or its last holder lets go
            if last_used < node.last_used:
                self._list(node)
                continue
            self._remove(node)
            freed += 1
        self.num_evicted += freed
        return freed

    def drop(self, salt: str) -> None:
        """Forget everything under `salt`."""
        root = self._roots.pop(salt, None)
        if root is None:
            return
        for node in list(self._below(root)):
            self._forget(node)

    def clear(self) -> None:
        """Forget everything: what the pages held is gone."""
        for salt in list(self._roots):
            self.drop(salt)

    def count_evictable(self) -> int:
        """What `num_evictable` should be, by looking at every page."""
        pinned: set[Node] = set()
        for page, held in self._node_of.items():
            node: Node | None = held if self._pool.holders(page) > 1 else None
            while node is not None and node not in pinned:
                pinned.add(node)
                node = node.parent
        return sum(node not in pinned for node in self._node_of.values())

    def check(self) -> None:
        seen: dict[int, Node] = {}
        listed = {id(node) for _, _, node in self._candidates}
        for salt, root in self._roots.items():
            assert root.children, f"the root of {salt!r} is empty and was not removed"
            for node in self._below(root):
                assert node.page not in seen, f"page {node.page} is in the tree twice"
                seen[node.page] = node
                assert len(node.key) == TOKEN_BYTES * self._page_size, "a page with a part of its tokens is in the tree"
                assert self._pool.holders(node.page) >= 1, f"page {node.page} is in the tree and free"
                assert all(child.parent is node for child in node.children.values())
                evictable = not node.children and self._pool.holders(node.page) == 1
                assert not evictable or id(node) in listed, f"page {node.page} can be evicted and is not listed"
        assert seen == self._node_of, "the index and the tree differ"
        counted = self.count_evictable()
        assert counted == self.num_evictable, f"{counted} pages can be evicted, {self.num_evictable} are counted"

    def _holds(self, place: Place) -> bool:
        return isinstance(place.end, Node) and self._node_of.get(place.end.page) is place.end

    def _enter(self, page: int, key: bytes, parent: Node) -> Node:
        if page in self._node_of:
            raise ValueError(f"page {page} is in the tree under other tokens")
        node = parent.children[key] = self._node_of[page] = Node(page, key, parent)
        self._pool.hold((page,))
        self.num_evictable += 1
        self._pin(node)  # by the sequence that enters it
        return node

    def _pin(self, node: Node) -> None:
        """Something more keeps `node` in the tree; the first such thing is one that keeps its parent."""
        node.pins += 1
        while node.pins == 1 and node.parent is not None:
            self.num_evictable -= 1
            node = node.parent
            node.pins += 1

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        while not node.pins and node.parent is not None:
            self.num_evictable += 1
            node = node.parent
            node.pins -= 1

    def _list(self, node: Node) -> None:
        if not node.listed and not node.children:
            node.listed = True
            heappush(self._candidates, (node.last_used, node.page, node))
            if len(self._candidates) > 2 * len(self._node_of) + 64:
                self._discard_outdated_candidates()

    def _discard_outdated_candidates(self) -> None:
        """Dropped prefixes leave entries behind; without eviction nothing else would remove them."""
        self._candidates = [entry for entry in self._candidates if self._node_of.get(entry[1]) is entry[2]]
        heapify(self._candidates)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        # Who uses a page uses those before it, but only the last one is told at the time.
        parent.last_used = max(parent.last_used, node.last_used)
        self._forget(node)
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[_decoded(parent.key)]
        elif self._pool.holders(parent.page) == 1:
            self._list(parent)

    def _forget(self, node: Node) -> None:
        if not node.pins:
            self.num_evictable -= 1
        del self._node_of[node.page]
        self._pool.release((node.page,))

    def _below(self, root: Node) -> Iterator[Node]:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _encoded(salt: str) -> bytes:
    """Whatever a client may send as a salt, half of a surrogate pair included."""
    return salt.encode(errors="surrogatepass")


def _decoded(key: bytes) -> str:
    return key.decode(errors="surrogatepass")
