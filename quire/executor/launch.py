"""A forward pass of a step: its chunks, laid out for a shape in one small array of integers."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from quire.core.plan import Chunk, StepPlan
from quire.executor.programs.ladder import StepShape
from quire.executor.shapes import Shapes
from quire.executor.shared_prefixes import MAX_GROUPS, PageTables, SharedTiles
from quire.ops.pages import TILE

NUM_FEATURES = 5
# A position from here on counts from the last token of its slot: where tokens are guessed, the device has the lengths.
FROM_THE_LAST = 1 << 30

Ints = np.ndarray[Any, np.dtype[np.int32]]
PagesByGroup = tuple[tuple[int, ...], ...]


class Inputs(NamedTuple):
    """The fields of a packed array. Padding has slot `num_slots`, which no sequence has."""

    slots: Any  # [tokens]
    positions: Any  # [tokens]; -1: padding; those of decodes may be FROM_THE_LAST, and so may `tile_starts`
    num_new: Any  # [rows] of steps with decodes only: the tokens that each samples
    tile_slots: Any  # [rows + tiles]: the single tokens, then the tiles of prefills
    tile_starts: Any
    tile_lengths: Any
    tile_offsets: Any
    page_slots: Any  # [updates]: entries added to page tables
    page_groups: Any
    page_indices: Any
    pages: Any
    ends: Any  # [num_samples]: the last token of each chunk and all of one with guesses, those that sample first
    fresh_offsets: Any  # [fresh_sequences]
    fresh_lengths: Any
    shared_tile_of: Any  # [rows] of shapes with shared tiles: the fields of `SharedPrefixes`
    shared_tokens: Any  # [shared tiles * TILE]
    shared_slots: Any  # [shared tiles]
    shared_lengths: Any


def num_single(shape: StepShape, shapes: Shapes) -> int:
    """Single tokens that a step of this shape can have besides its prefills; scored ones are prefills."""
    return 0 if shape.scores or shape.fresh_sequences else min(shape.tokens, shapes.num_slots)


def num_shared_tiles(shape: StepShape, shapes: Shapes) -> int:
    """Tiles of decodes that read shared pages together for which there is room."""
    rows = shape.tokens if shape.decodes_only else num_single(shape, shapes)
    return rows // TILE + MAX_GROUPS if shapes.ladder.shares(shape) else 0


def sizes(shape: StepShape, shapes: Shapes) -> Inputs:
    """The length of each field."""
    tiles = 0 if shape.decodes_only else num_single(shape, shapes) + shapes.ladder.num_tiles(shape)
    tokens, rows = shape.tokens, min(shape.tokens, shapes.num_slots)
    # A chunk begins at most one page more than its tokens fill.
    updates = shapes.num_groups * (tokens // shapes.page_size + rows * (1 + (shapes.burst - 1) // shapes.page_size))
    num_new = tokens if shape.decodes_only else 0
    fresh = shape.fresh_sequences
    of_tiles, of_updates = (tiles,) * 4, (updates,) * 4
    shared = num_shared_tiles(shape, shapes)
    single = 0 if not shared else tokens if shape.decodes_only else num_single(shape, shapes)
    of_shared = (single, shared * TILE, shared, shared)
    return Inputs(*(tokens, tokens, num_new), *of_tiles, *of_updates, *(shapes.num_samples, fresh, fresh), *of_shared)


def fields(packed: Any, shape: StepShape, shapes: Shapes) -> Inputs:
    """The parts of a packed array, on the host or on the device; their sizes are constants of the shape."""
    parts, start = [], 0
    for size in sizes(shape, shapes):
        parts.append(packed[start : start + size])
        start += size
    return Inputs(*parts)


def padding(shape: StepShape, shapes: Shapes) -> tuple[Ints, Inputs]:
    """The inputs of a forward pass that computes nothing, as a whole and by field."""
    packed = np.zeros(sum(sizes(shape, shapes)), np.int32)
    into = fields(packed, shape, shapes)
    for slots in (into.slots, into.tile_slots, into.page_slots):
        slots.fill(shapes.num_slots)
    for numbers in (into.positions, into.shared_tile_of, into.shared_tokens):
        numbers.fill(-1)
    return packed, into


@dataclass(frozen=True, eq=False)
class Launch:
    """Chunks of a plan that run together, in columns: `num_rows` single tokens come first, then prefills."""

    num_rows: int
    scores: bool  # whether the log-probabilities of prompts are asked for
    verifies: bool  # whether some chunks have guesses
    new_pages: list[PagesByGroup]  # of each chunk those that are not in its page tables yet
    indices: Ints  # of the chunks in the plan
    slots: Ints
    starts: Ints  # the position of the first token; where tokens are guessed, the highest that it can have
    firsts: Ints  # the same as the device is told: FROM_THE_LAST where it has the length before the host
    lengths: Ints  # tokens; a row is one, also in a burst
    num_new: Ints  # tokens that are sampled, in all launches of a burst
    shared: SharedTiles | None = None  # of the rows, where they read so many positions together that it pays

    @property
    def num_prefills(self) -> int:
        return len(self.indices) - self.num_rows

    @cached_property
    def order(self) -> Any:
        """The chunks, those that sample first: the order of their last tokens."""
        samples = self.num_new > 0
        return slice(None) if samples.all() else np.argsort(~samples, kind="stable")

    @cached_property
    def num_samples(self) -> Ints:
        """In that order, the tokens that this launch samples of each chunk: one, or one after each of its tokens if
        those are guesses."""
        counts: Ints = np.minimum(self.num_new, self.lengths)[self.order]
        return counts

    @cached_property
    def sampled(self) -> list[int]:
        """For each token that it samples the index of its chunk in the plan."""
        chunks: list[int] = np.repeat(self.indices[self.order], self.num_samples).tolist()
        return chunks

    @cached_property
    def unsampled(self) -> list[int]:
        """The indices of the chunks that sample nothing."""
        chunks: list[int] = self.indices[self.num_new == 0].tolist()
        return chunks

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def num_tiles(self) -> int:
        return int((-(-self.lengths[self.num_rows :] // TILE)).sum())

    @cached_property
    def shape(self) -> StepShape:
        """The smallest shape that it could run in."""
        are_fresh = not self.num_rows and not self.scores and not self.starts.any()
        fresh = len(self.indices) if are_fresh else 0
        return StepShape(self.num_tokens, not self.num_prefills, self.scores, fresh, self.shared is not None)

    def next_of_burst(self) -> "Launch":
        """The rows that sample more than one token, at the next of them."""
        firsts = np.where(self.firsts < FROM_THE_LAST, self.firsts + 1, self.firsts)
        columns = np.stack([self.indices, self.slots, self.starts + 1, firsts, self.lengths, self.num_new - 1])
        columns = columns[:, self.num_new > 1]
        new_pages: list[PagesByGroup] = [()] * columns.shape[1]  # the first launch brought them
        return Launch(len(new_pages), False, False, new_pages, *columns)


def launches_of(plan: StepPlan, shapes: Shapes, scored: Collection[int] = ()) -> list[Launch]:
    """The launches of a plan: one, and one for the chunks with scored prompt tokens, by index. Single tokens of prompts
    are computed as decodes are, unless sums have a fixed order."""
    if not plan.chunks:
        return []
    chunks, count = plan.chunks, len(plan.chunks)
    by_field = Chunk(*zip(*chunks, strict=True))  # type: ignore[arg-type]  # faster than chunk by chunk
    new_pages: Any = by_field.new_pages
    if plan.started:  # their pages are placed with the rest of their state
        started = {start.slot for start in plan.started}
        new_pages = [() if chunk.slot in started else chunk.new_pages for chunk in chunks]
    columns = np.empty((6, count), np.int32)
    columns[0], columns[1], columns[2] = np.arange(count), by_field.slot, by_field.start
    columns[3], columns[4], columns[5] = columns[2], by_field.length, by_field.samples
    num_growing = plan.num_decodes + plan.num_verified  # the first chunks, which sample after each of their tokens
    columns[5, :num_growing] *= columns[4, :num_growing]
    if shapes.guesses:
        columns[3, :num_growing] = FROM_THE_LAST
    rows, prefills = [*range(plan.num_decodes)], list[int]()
    least = 1 if shapes.fixed_order else 2  # tokens of a prompt that are computed as such
    for index in range(plan.num_decodes, count):
        if index not in scored:
            (prefills if chunks[index].length >= least else rows).append(index)
    starts: Any = by_field.start
    # Those with the longest contexts begin first, or the device would wait for the last of them.
    rows.sort(key=starts.__getitem__, reverse=True)
    launches = []
    for num_rows, those, scores in ((len(rows), rows + prefills, False), (0, sorted(scored), True)):
        if those:
            own = columns[:, those]
            own[4, :num_rows] = 1
            verifies = plan.num_verified > 0 and not scores
            launches.append(Launch(num_rows, scores, verifies, [new_pages[index] for index in those], *own))
    return launches


class Packer:
    """Fills the integers of a launch. Knows how long the page tables of each slot are, which the device does not."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._table_lengths = [[0] * shapes.num_groups for _ in range(shapes.num_slots + 1)]
        self._tables: PageTables | None = None
        if shapes.shared_groups:
            self._tables = PageTables(shapes.num_slots, shapes.table_size, shapes.page_size, shapes.shared_groups)

    def start(self, slot: int, new_pages: PagesByGroup) -> None:
        """The slot begins with these pages, which are placed with the rest of its state."""
        self._table_lengths[slot] = [len(pages) for pages in new_pages] or [0] * self._shapes.num_groups
        if self._tables is not None:
            self._tables.start(slot, new_pages)

    def with_shared(self, launch: Launch) -> Launch:
        """The launch with the tiles of rows that read shared pages together."""
        if self._tables is None or not launch.num_rows:
            return launch
        rows = slice(launch.num_rows)
        return replace(launch, shared=self._tables.find(launch.slots[rows], launch.starts[rows]))

    def pack(self, launch: Launch, shape: StepShape) -> Ints:
        """The inputs of the forward pass."""
        packed, into = padding(shape, self._shapes)
        lengths, count = launch.lengths, launch.num_tokens
        ends = np.cumsum(lengths, dtype=np.int32)
        begins = ends - lengths
        if launch.num_prefills:
            into.slots[:count] = np.repeat(launch.slots, lengths)
            into.positions[:count] = np.arange(count) + np.repeat(launch.firsts - begins, lengths)
        else:
            into.slots[:count], into.positions[:count] = launch.slots, launch.firsts
        last = ends[launch.order] - 1
        if launch.verifies:
            last = _each_of(launch.num_samples, last)
        into.ends[: len(last)] = last
        if shape.decodes_only:
            into.num_new[:count] = launch.num_new
        else:
            self._pack_tiles(into, launch, begins, num_single(shape, self._shapes))
        if shape.fresh_sequences:
            into.fresh_offsets.fill(-1)
            into.fresh_lengths.fill(-1)
            into.fresh_offsets[: len(lengths)] = begins
            into.fresh_lengths[: len(lengths)] = lengths
        if launch.shared is not None and len(into.shared_tile_of):
            for whole, part in zip(into[-4:], launch.shared, strict=True):
                whole[: part.size] = part.reshape(-1)
        self._pack_pages(into, launch)
        return packed

    @staticmethod
    def _pack_tiles(into: Inputs, launch: Launch, begins: Ints, first: int) -> None:
        """The single tokens at the front, the tiles of prefills from `first` on."""
        rows = launch.num_rows
        lengths, firsts = launch.lengths[rows:], launch.firsts[rows:]
        counts = -(-lengths // TILE)
        last = first + int(counts.sum())
        within = TILE * (np.arange(last - first) - np.repeat(np.cumsum(counts) - counts, counts))
        # Those with the longest contexts begin first here too.
        order = np.argsort(-(np.repeat(firsts, counts) + within), kind="stable")
        values = (
            (into.tile_slots, launch.slots[:rows], np.repeat(launch.slots[rows:], counts)),
            (into.tile_starts, launch.firsts[:rows], np.repeat(firsts, counts) + within),
            (into.tile_lengths, 1, np.minimum(np.repeat(lengths, counts) - within, TILE)),
            (into.tile_offsets, np.arange(rows), np.repeat(begins[rows:], counts) + within),
        )
        for array, single, tiles in values:
            array[:rows] = single
            array[first:last] = tiles[order]

    def new_entries(self, new_pages: Iterable[tuple[int, PagesByGroup]]) -> list[tuple[int, int, int, int]]:
        """The entries that new pages of slots are in their page tables: slot, group, index and page."""
        return [
            (slot, group, index, page)
            for slot, by_group in new_pages
            for group, pages in enumerate(by_group)
            for index, page in enumerate(pages, self._table_lengths[slot][group])
        ]

    def _pack_pages(self, into: Inputs, launch: Launch) -> None:
        new = [(slot, pages) for slot, pages in zip(launch.slots.tolist(), launch.new_pages, strict=True) if pages]
        entries = self.new_entries(new)
        for slot, by_group in new:
            for group, pages in enumerate(by_group):
                self._table_lengths[slot][group] += len(pages)
            if self._tables is not None:
                self._tables.append(slot, by_group)
        if entries:
            columns = (into.page_slots, into.page_groups, into.page_indices, into.pages)
            for column, values in zip(columns, np.array(entries, np.int32).T, strict=True):
                column[: len(entries)] = values

    def pack_samples(self, launch: Launch, size: int, features: Sequence[Any]) -> Ints:
        """The inputs of sampling: of `size` tokens to sample their slots and positions, whether they are sampled and
        how many guesses are before them; the features."""
        fields = num_sample_fields(self._shapes.guesses > 0)
        packed = np.zeros(fields * size + NUM_FEATURES, np.int32)
        slots, positions, samples, *guesses = packed[: fields * size].reshape(fields, size)
        slots.fill(self._shapes.num_slots)
        total = len(launch.sampled)
        last = (launch.firsts + launch.lengths - 1)[launch.order]
        if launch.verifies:
            counts = launch.num_samples[launch.num_samples > 0]
            last = _each_of(counts, last[: len(counts)])
            guesses[0][:total] = _each_of(counts, counts - 1)
            slots[:total] = np.repeat(launch.slots[launch.order], launch.num_samples)
        else:
            slots[:total] = launch.slots[launch.order][:total]
        positions[:total], samples[:total] = last[:total], 1
        packed[fields * size :] = features
        return packed


def num_sample_fields(guesses: bool) -> int:
    """Integers of each token to sample, in the packed array of the sampler; one more where tokens are guessed."""
    return 4 if guesses else 3


def _each_of(counts: Ints, last: Ints) -> Ints:
    """For each of `last` the last `count` numbers up to it, ascending; one where the count is 0."""
    repeats = np.maximum(counts, 1)
    ends = np.cumsum(repeats, dtype=np.int32)
    every: Ints = np.arange(ends[-1], dtype=np.int32) + np.repeat(last + 1 - ends, repeats)
    return every
