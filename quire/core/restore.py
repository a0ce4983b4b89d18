"""The pages of a prefix that come back from the host to the device."""

from collections.abc import Iterable

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
        return [one for row in self.rows for one in row if isinstance(one, int) and one]

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
    return [one for row in rows for one in row if isinstance(one, HostPage)]
