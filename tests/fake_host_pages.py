"""The host's pages of the fake executor."""

import struct

from quire.core.plan import PageCopy, Tier

_PLACE = struct.Struct("<3q")
PLACE_BYTES = _PLACE.size

# By place in a page: the group, position and digest that stand there, and the step that wrote them.
Page = list[tuple[int, int, int, int] | None]


class FakeHostPages:
    """Pages that are written when the step that copies to them is collected.

    None may be read before, nor be written while a step reads it that was not collected.
    """

    def __init__(self, num_pages: int) -> None:
        self._pages: list[Page | None] = [None] * num_pages
        self._arriving: dict[int, tuple[int, Page]] = {}  # by page: the step that copies to it, and its contents
        self._readers: dict[int, int] = {}  # by page: the last step that reads it
        self._last_collected = 0

    def read(self, page: int, step: int) -> Page:
        assert page not in self._arriving, f"host page {page} is read before it is there"
        found = self._pages[page]
        assert found is not None, f"host page {page} is read, where nothing was written"
        self._readers[page] = step
        return found

    def write(self, page: int, contents: Page, step: int) -> None:
        assert page not in self._arriving, f"host page {page} is written by two steps"
        reader = self._readers.get(page, 0)
        assert reader <= self._last_collected, f"host page {page} is written while step {reader} reads it"
        self._pages[page] = None
        self._arriving[page] = step, list(contents)

    def enter(self, page: int, contents: Page) -> None:
        """Write a page that comes from another engine."""
        assert page not in self._arriving, f"host page {page} is written while a step copies to it"
        reader = self._readers.get(page, 0)
        assert reader <= self._last_collected, f"host page {page} is written while step {reader} reads it"
        self._pages[page] = contents

    def collect(self, step: int) -> None:
        """The result of this step is known."""
        self._last_collected = step
        for page, (writer, contents) in list(self._arriving.items()):
            if writer <= step:
                self._pages[page] = contents
                del self._arriving[page]

    def lose(self) -> None:
        """What steps copy that were not collected never arrives."""
        self._arriving.clear()
        self._readers.clear()


def page_to_bytes(page: Page) -> bytes:
    assert all(place is not None for place in page), "a page is read that is not full"
    return b"".join(_PLACE.pack(*place[:3]) for place in page if place is not None)


def page_of_bytes(data: memoryview) -> Page:
    return [(*_PLACE.unpack_from(data, at), 0) for at in range(0, len(data), _PLACE.size)]


def copy_page(copy: PageCopy, device: list[Page], host: FakeHostPages, step: int) -> None:
    (from_tier, source), (to_tier, target) = copy
    assert 0 not in (source, target), "page 0 is copied"
    assert Tier.DEVICE in (from_tier, to_tier), "pages are copied within the host"
    contents = host.read(source, step) if from_tier is Tier.HOST else device[source]
    if to_tier is Tier.HOST:
        host.write(target, contents, step)
    else:
        device[target] = list(contents)
