"""The part of a cached prefix that a sequence can go on after."""

from collections.abc import Sequence

from quire.core.prefix_tree import Node
from quire.reach import ChunkReach, first_page

Window = tuple[int, int | ChunkReach]  # a page group, and the positions that it reads


def usable_prefix(path: list[Node], page_size: int, windows: Sequence[Window], with_state: bool) -> int:
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
