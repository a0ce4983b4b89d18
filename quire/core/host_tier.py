"""Pages in host memory, behind the prefix cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.core.page_pool import PagePool
from quire.core.plan import PageCopy, copy_to_host
from quire.core.prefix_tree import Node, digest_after, digest_of_salt, encoded, page_keys
from quire.core.restore import HostPage, PageKey


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
        for one in saved:
            one.is_ready = True
            self._pool.release((one.page,))

    def abandon(self, saved: Iterable[HostPage]) -> None:
        """The copies to these pages have not worked, or never will."""
        for one in saved:
            self._forget(one)
            self._pool.release((one.page,))

    def has(self, key: PageKey) -> bool:
        """True if the tier has a page for `key`, or one that is being written."""
        return key in self._pages

    # Pages that are read

    def find(self, digest: bytes, group: int) -> HostPage | None:
        """The page of a prefix, if it can be read."""
        found = self._pages.get((digest, group))
        return found if found is not None and found.is_ready else None

    def hold(self, pages: Iterable[HostPage]) -> None:
        """They will be read, and stay until they are released. They count as used now, the first as the last one: what
        follows a page is useless without it."""
        held = list(pages)
        self._pool.hold([one.page for one in held])
        for one in reversed(held):
            if self._pages.get(one.key) is one:
                self._pages.move_to_end(one.key)

    def release(self, pages: Iterable[HostPage]) -> None:
        self._pool.release([one.page for one in pages])

    def distrust(self, pages: Iterable[HostPage]) -> None:
        """A step that read them failed. They are forgotten, so that the next try does without them."""
        for one in pages:
            self._forget(one)

    def lose(self, pages: Iterable[int]) -> None:
        """The copies to these pages have failed, after their steps had a result. One that is not ready has been taken
        for something else since, which is still to be written."""
        lost = set(pages)
        for one in [one for one in self._pages.values() if one.page in lost and one.is_ready]:
            self.num_lost += 1
            self._forget(one)

    def reserve(self, key: PageKey) -> HostPage | None:
        """A page to be written, by a copy of a plan or from elsewhere; `confirm` or `abandon` ends that.

        None when the tier has one for `key` already, or when all are in use."""
        if key in self._pages:
            return None
        if not self._pool.num_free:
            oldest = next((one for one in self._pages.values() if one.is_ready and self._is_idle(one)), None)
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
        for one in list(self._pages.values()):
            self._forget(one)

    @property
    def is_balanced(self) -> bool:
        """True if nothing but the tier holds pages, which is so while nothing runs."""
        return all(self._is_idle(one) for one in self._pages.values()) and (
            self._pool.num_free + len(self._pages) == self._pool.num_usable
        )

    def check(self) -> None:
        self._pool.check()
        pages = [one.page for one in self._pages.values()]
        assert len(set(pages)) == len(pages), "a host page is in the tier twice"
        assert all(self._pool.holders(page) for page in pages), "a host page is in the tier and free"
        assert all(one.key == key for key, one in self._pages.items())
        for one in self._pages.values():
            assert one.is_ready or self._pool.holders(one.page) > 1, "a page that is not ready is not being written"
        assert len(self._copies) == len(self._saving)

    def _is_idle(self, one: HostPage) -> bool:
        return self._pool.holders(one.page) == 1

    def _forget(self, one: HostPage) -> None:
        if self._pages.get(one.key) is one:
            del self._pages[one.key]
            self._pool.release((one.page,))


def prefix_digests(salt: str, tokens: Sequence[int], page_size: int, num_pages: int, known: list[bytes]) -> list[bytes]:
    """The digests of the prefixes that end with each of the first `num_pages`. `known` are the first of them, and are
    extended."""
    digest = known[-1] if known else digest_of_salt(encoded(salt))
    for key in page_keys(tokens, len(known), num_pages, page_size):
        digest = digest_after(digest, key)
        known.append(digest)
    return known
