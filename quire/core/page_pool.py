"""Reference counts of pages."""

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Counts the holders of each page.

    Every page is free with no holders, or held one or more times. Page 0 takes the writes of padding rows, so it is
    never handed out. Owned by the engine thread.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs 2 pages or more (page 0 is reserved), got {num_pages}")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def free_pages(self) -> dict[int, int]:
        """The number of times that each page stands among the free ones: once, if all is well."""
        return Counter(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` free pages, each with one holder; None, and nothing taken, when there are not enough."""
        if count < 0:
            raise ValueError(f"{count} pages cannot be taken")
        free = self._free
        if count > len(free):
            return None
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> list[int]:
        """Returns those of `pages` that had one holder and have two."""
        holders, shared = self._holders, []
        for page in pages:
            count = holders[page]
            if not count:
                raise ValueError(f"page {page} is free and cannot be held")
            holders[page] = count + 1
            if count == 1:
                shared.append(page)
        return shared

    def release(self, pages: Iterable[int]) -> list[int]:
        """Returns those of `pages` that had two holders and have one."""
        holders, unshared = self._holders, []
        for page in pages:
            count = holders[page] - 1
            if count < 0:
                raise ValueError(f"page {page} is free and cannot be released")
            holders[page] = count
            if count == 1:
                unshared.append(page)
            elif not count:
                self._free.append(page)
        return unshared

    def check(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert 0 not in free, "page 0 is free"
        assert self._holders[0] == 0, "page 0 is held"
        for page in range(1, self.num_pages):
            held = self._holders[page] > 0
            assert held != (page in free), f"page {page} is free and held, or neither"
