"""Pages in host memory, behind the prefix cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.core.page_pool import PagePool
from quire.core.plan import PageCopy, copy_to_host
from quire.core.prefix_tree import Node, digest_after, digest_of_salt, encoded, page_keys

PageKey = tuple[bytes, int]  # the digest of the prefix that ends with the page, and the page's group


class HostPage:
    """A page of the host with the contents of one page of one group.

    It can be read once it `is_ready`: a result has confirmed the copy that wrote it, or it was inserted.
    """

    __slots__ = ("is_ready", "key", "page")

    def __init__(self, key: PageKey, page: int) -> None:
        self.key = key
        self.page = page
        self.is_ready = False


# The pages of one page of tokens, by group: one of the host, which is copied; one of the device; 0: none is read.
Row = tuple[HostPage | int, ...]


class Restore:
    """The pages that a sequence takes from the host before it computes.

    They follow the pages of the device that it begins with, up to page `end`, where every group then has what going on
    reads. The sequence holds all of them from its start: those of the host until they are copied, those of the device
    because its tables have them then.
    """

    __slots__ = ("end", "rows")

    def __init__(self, rows: list[Row], end: int) -> None:
        self.rows = rows  # those that are left
        self.end = end  # in pages

    def device_pages(self) -> list[int]:
        """The pages on the device that are left."""
        return [page for row in self.rows for page in row if isinstance(page, int) and page]

    def num_rows_within(self, num_copies: int, at_least_one: bool) -> int:
        """The number of rows that `num_copies` restore, or the first one that needs any."""
        most = num_copies
        if not self.rows or most >= len(self.rows) * len(self.rows[0]):
            return len(self.rows)
        for count, row in enumerate(self.rows):
            needed = len(host_pages((row,)))
            if needed > num_copies and not (at_least_one and num_copies == most):
                return count
            num_copies -= needed
        return len(self.rows)


def host_pages(rows: Iterable[Row]) -> list[HostPage]:
    return [page for row in rows for page in row if isinstance(page, HostPage)]


class HostTier:
    """Pages of host memory by the prefix that they end, and the copies that fill them.

    What the prefix cache evicts is saved here: a copy from the device enters the plan under construction, up to
    `max_saves` in a plan; what exceeds that is lost, as without this tier. The tier is one holder of each of its pages;
    a copy under way and a sequence that will read it are others. The least recently used page that is ready and that
    nothing else holds gives way to a new one. A page stays here when it is copied back to the device. Owned by the
    engine thread.
    """

    def __init__(self, num_pages: int, max_saves: int) -> None:
        """`num_pages` includes page 0, which takes the writes of padding and is never used."""
        self._pool = PagePool(num_pages)
        self._max_saves = max_saves
        self._pages: OrderedDict[PageKey, HostPage] = OrderedDict()  # least recently used first
        self._copies: list[PageCopy] = []  # for the next plan
        self._saving: list[HostPage] = []  # their targets
        self.num_saved = 0  # since the start, as the others
        self.num_restored = 0
        self.num_lost = 0  # evicted from the device and not saved, or saved by a copy that failed

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def num_usable(self) -> int:
        return self._pool.num_usable

    # Pages that leave the device

    def save(self, node: Node, groups: Iterable[int]) -> None:
        """The pages of these groups leave the device. They are kept here, if they are not here already."""
        digest = node.digest()
        for group in groups:
            if not (page := node.pages[group]):
                continue
            key = digest, group
            if key in self._pages:
                self._pages.move_to_end(key)
                continue
            saved = self.reserve(key) if len(self._copies) < self._max_saves else None
            if saved is None:
                self.num_lost += 1
                continue
            self._saving.append(saved)
            self._copies.append(copy_to_host(page, saved.page))

    def take_saves(self) -> tuple[list[PageCopy], list[HostPage]]:
        """The copies that the next plan must begin with, and their targets, which `confirm` or `abandon` gets."""
        taken = self._copies, self._saving
        self._copies, self._saving = [], []
        return taken

    def confirm(self, saved: Iterable[HostPage]) -> None:
        """The copies to these pages have worked."""
        for host_page in saved:
            host_page.is_ready = True
            self._pool.release((host_page.page,))

    def abandon(self, saved: Iterable[HostPage]) -> None:
        """The copies to these pages have not worked, or never will."""
        for host_page in saved:
            self._forget(host_page)
            self._pool.release((host_page.page,))

    def has(self, key: PageKey) -> bool:
        """True if the tier has a page for `key`, or one that is being written."""
        return key in self._pages

    # Pages that are read

    def find(self, digest: bytes, group: int) -> HostPage | None:
        """The page of a prefix, if it can be read."""
        host_page = self._pages.get((digest, group))
        return host_page if host_page is not None and host_page.is_ready else None

    def hold(self, pages: Iterable[HostPage]) -> None:
        """They will be read, and stay until they are released. They count as used now, the first as the last one: what
        follows a page is useless without it."""
        held = list(pages)
        self._pool.hold([host_page.page for host_page in held])
        for host_page in reversed(held):
            if self._pages.get(host_page.key) is host_page:
                self._pages.move_to_end(host_page.key)

    def release(self, pages: Iterable[HostPage]) -> None:
        self._pool.release([host_page.page for host_page in pages])

    def distrust(self, pages: Iterable[HostPage]) -> None:
        """A step that read them failed. They are forgotten, so that the next try does without them."""
        for host_page in pages:
            self._forget(host_page)

    def lose(self, pages: Iterable[int]) -> None:
        """The copies to these pages have failed, after their steps had a result. One that is not ready has been taken
        for something else since, which is still to be written."""
        lost = set(pages)
        for host_page in [
            host_page for host_page in self._pages.values() if host_page.page in lost and host_page.is_ready
        ]:
            self.num_lost += 1
            self._forget(host_page)

    def reserve(self, key: PageKey) -> HostPage | None:
        """A page to be written, by a copy of a plan or from elsewhere; `confirm` or `abandon` ends that.

        None when the tier has one for `key` already, or when all are in use."""
        if key in self._pages:
            return None
        if not self._pool.num_free:
            oldest = next(
                (host_page for host_page in self._pages.values() if host_page.is_ready and self._is_idle(host_page)),
                None,
            )
            if oldest is None:
                return None
            self._forget(oldest)
        pages = self._pool.take(1)
        assert pages is not None
        self._pool.hold(pages)
        reserved = self._pages[key] = HostPage(key, pages[0])
        return reserved

    def clear(self) -> None:
        """Forget everything. Pages that are being written or read are free when that has ended."""
        for host_page in list(self._pages.values()):
            self._forget(host_page)

    @property
    def is_balanced(self) -> bool:
        """True if nothing but the tier holds pages, which is so while nothing runs."""
        return all(self._is_idle(host_page) for host_page in self._pages.values()) and (
            self._pool.num_free + len(self._pages) == self._pool.num_usable
        )

    def check(self) -> None:
        self._pool.check()
        pages = [host_page.page for host_page in self._pages.values()]
        assert len(set(pages)) == len(pages), "a host page is in the tier twice"
        assert all(self._pool.holders(page) for page in pages), "a host page is in the tier and free"
        assert all(host_page.key == key for key, host_page in self._pages.items())
        for host_page in self._pages.values():
            assert host_page.is_ready or self._pool.holders(host_page.page) > 1, (
                "a page that is not ready is not being written"
            )
        assert len(self._copies) == len(self._saving)

    def _is_idle(self, host_page: HostPage) -> bool:
        return self._pool.holders(host_page.page) == 1

    def _forget(self, host_page: HostPage) -> None:
        if self._pages.get(host_page.key) is host_page:
            del self._pages[host_page.key]
            self._pool.release((host_page.page,))


def prefix_digests(salt: str, tokens: Sequence[int], page_size: int, num_pages: int, known: list[bytes]) -> list[bytes]:
    """The digests of the prefixes that end with each of the first `num_pages`. `known` are the first of them, and are
    extended."""
    digest = known[-1] if known else digest_of_salt(encoded(salt))
    for key in page_keys(tokens, len(known), num_pages, page_size):
        digest = digest_after(digest, key)
        known.append(digest)
    return known
