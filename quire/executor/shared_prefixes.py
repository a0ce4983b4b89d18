"""Decodes whose page tables begin with the same pages: found on the host, so that a kernel reads these once for all.

Sequences with a common beginning have the same pages there, as the prefix cache gave them. The tables of the rows are
sorted, so that those which begin alike are neighbours, and divided into groups where that saves the most. Rows change
when a sequence begins or ends; between such steps the last answer holds.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from quire.ops.pages import SHARED_STEP, TILE

MAX_GROUPS = 16
MAX_LEVELS = 32  # groups within groups that are looked at: requests may be made such that there are many
MIN_ROWS = 4  # of a group
TILE_COST = 2  # rows that read a position alone in the time in which a tile does: an estimate
# Positions that a step must not read, in all: one more kernel in each layer takes its time, and few rows that ask for
# more than a plain token run in a program of 256 tokens where they share pages.
MIN_SAVED = 1 << 17

Ints = np.ndarray[Any, np.dtype[np.int32]]


class SharedTiles(NamedTuple):
    """The fields of `SharedPrefixes`, for a launch of n rows in m tiles."""

    tile_of: Ints  # [n]
    tokens: Ints  # [m, TILE]
    slots: Ints  # [m]
    lengths: Ints  # [m]


class RowGroup(NamedTuple):
    first: int  # in the order of the tables
    end: int
    length: int  # pages
    saved: int  # pages that are not read


class PageTables:
    """The pages of each slot in the groups of pages that keep all positions. Owned by the packer."""

    def __init__(self, num_slots: int, table_size: int, page_size: int, groups: Sequence[int]) -> None:
        self._groups = groups
        self._page_size = page_size
        self._multiple = lcm(page_size, SHARED_STEP) // page_size  # pages
        self._pages = np.zeros((num_slots + 1, table_size, len(groups)), np.int32)
        self._lengths = np.zeros(num_slots + 1, np.int32)  # pages that all groups have
        self._last_rows: bytes | None = None
        self._last: SharedTiles | None = None

    def start(self, slot: int, new_pages: Sequence[Sequence[int]]) -> None:
        """The slot begins with these pages."""
        self._lengths[slot], self._last_rows = 0, None
        self.append(slot, new_pages)

    def append(self, slot: int, new_pages: Sequence[Sequence[int]]) -> None:
        """By page group."""
        if not new_pages:
            return
        begin = int(self._lengths[slot])
        count = min(len(new_pages[group]) for group in self._groups)
        for column, group in enumerate(self._groups):
            self._pages[slot, begin : begin + count, column] = new_pages[group][:count]
        self._lengths[slot] += count

    def find(self, slots: Ints, starts: Ints) -> SharedTiles | None:
        """The tiles of rows with these slots, which have computed so many positions; None where too little is saved."""
        rows = slots.tobytes()
        if rows != self._last_rows:
            self._last_rows, self._last = rows, self._find(slots, starts)
        return self._last

    def _find(self, slots: Ints, starts: Ints) -> SharedTiles | None:
        usable = np.minimum(self._lengths[slots], starts // self._page_size)
        firsts = np.where(usable >= self._multiple, self._pages[slots, 0, 0], -1)
        _, inverse, counts = np.unique(firsts, return_inverse=True, return_counts=True)
        rows = np.flatnonzero((counts[inverse] >= MIN_ROWS) & (firsts >= 0))
        if not len(rows) or int(usable[rows].sum()) * self._page_size < MIN_SAVED:
            return None
        tables = self._pages[slots[rows], : usable[rows].max()]
        keys = [table.tobytes() for table in tables]
        order = np.array(sorted(range(len(rows)), key=keys.__getitem__))
        rows, tables = rows[order], tables[order]
        is_other = (tables[1:] != tables[:-1]).any(axis=2)
        common = np.where(is_other.any(axis=1), is_other.argmax(axis=1), tables.shape[1])
        common = np.minimum(common, np.minimum(usable[rows[1:]], usable[rows[:-1]]))
        divided = _divided((common // self._multiple * self._multiple).tolist(), 0, len(rows))
        groups = sorted(divided, key=lambda group: -group.saved)[:MAX_GROUPS]
        if sum(group.saved for group in groups) * self._page_size < MIN_SAVED:
            return None
        return self._tiles(slots, [(rows[group.first : group.end], group.length * self._page_size) for group in groups])

    @staticmethod
    def _tiles(slots: Ints, groups: Sequence[tuple[Any, int]]) -> SharedTiles:
        cut = [(rows[at : at + TILE], length) for rows, length in groups for at in range(0, len(rows), TILE)]
        tile_of, tokens = np.full(len(slots), -1, np.int32), np.full((len(cut), TILE), -1, np.int32)
        for tile, (rows, _) in enumerate(cut):
            tile_of[rows], tokens[tile, : len(rows)] = tile, rows
        return SharedTiles(tile_of, tokens, slots[tokens[:, 0]], np.array([length for _, length in cut], np.int32))


def _divided(common: list[int], first: int, end: int, levels: int = MAX_LEVELS) -> list[RowGroup]:
    """The groups of rows from `first` to before `end` that save the most; `common` are the pages that each row has in
    common with the next."""
    if end - first < MIN_ROWS:
        return []
    between = common[first : end - 1]
    length = min(between)
    bounds = [first, *(at for at, pages in enumerate(between, first + 1) if pages == length), end]
    within = []
    if levels and length < max(between):
        within = [group for begin, stop in pairwise(bounds) for group in _divided(common, begin, stop, levels - 1)]
    saved = (end - first - TILE_COST * -(-(end - first) // TILE)) * length
    if saved > sum(group.saved for group in within):
        return [RowGroup(first, end, length, saved)]
    return within
