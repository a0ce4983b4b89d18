"""A forward pass of a step: its chunks, laid out for a shape in one small array of integers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from quire.core.plan import Chunk, Kind
from quire.executor.programs.ladder import StepShape
from quire.executor.shapes import Shapes
from quire.executor.shared_prefixes import MAX_GROUPS, PageTables, SharedTiles
from quire.ops.pages import TILE

NUM_FEATURES = 5
# A position from here on counts from the last token of its slot: where tokens are guessed, the device has the lengths.
FROM_THE_LAST = 1 << 30

Ints = np.ndarray[Any, np.dtype[np.int32]]


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


@dataclass(frozen=True)
class Launch:
    """Chunks of a plan, by their index in it, that run together."""

    rows: list[int] = field(default_factory=list)  # of one token
    prefills: list[int] = field(default_factory=list)
    scores: bool = False
    verifies: bool = False  # some of the prefills are guesses
    offset: int = 0  # tokens of each chunk that earlier launches of the same plan computed: in a burst
    shared: SharedTiles | None = None  # of the rows, where they read so many positions together that it pays

    @property
    def indices(self) -> list[int]:
        return self.rows + self.prefills

    def samples(self, chunks: Sequence[Chunk]) -> list[int]:
        """All chunks, those that sample first: the order of their last tokens."""
        return sorted(self.indices, key=lambda index: not chunks[index].samples)

    def num_tokens(self, chunks: Sequence[Chunk]) -> int:
        return len(self.rows) + sum(chunks[index].length for index in self.prefills)

    def num_tiles(self, chunks: Sequence[Chunk]) -> int:
        return sum(-(-chunks[index].length // TILE) for index in self.prefills)

    def shape(self, chunks: Sequence[Chunk]) -> StepShape:
        """The smallest shape that it could run in."""
        are_fresh = not self.rows and all(chunks[index].start == 0 for index in self.prefills)
        fresh = len(self.prefills) if are_fresh and not self.scores else 0
        return StepShape(self.num_tokens(chunks), not self.prefills, self.scores, fresh, self.shared is not None)


def split(chunks: Sequence[Chunk], scored: Iterable[int], by_kind: bool = False) -> list[Launch]:
    """The launches of a plan: one, and one for the chunks with scored prompt tokens. Unless they go `by_kind`, single
    tokens of prompts are computed as decodes are."""
    apart = set(scored)
    columns = Chunk(*zip(*chunks, strict=True))  # type: ignore[arg-type]  # each field of all chunks: faster than one by one
    kinds: Any = columns.kind
    starts: Any = columns.start
    if not {Kind.PREFILL, Kind.FORCED, Kind.VERIFY}.intersection(kinds):
        rows, prefills = [*range(len(chunks))], []
    else:
        others = [index for index in range(len(chunks)) if index not in apart]
        least = 1 if by_kind else 2  # tokens of a prompt that are computed as such
        rows = [index for index in others if kinds[index] is Kind.DECODE or chunks[index].length < least]
        prefills = [index for index in others if kinds[index] is not Kind.DECODE and chunks[index].length >= least]
    # Those with the longest contexts begin first, or the device would wait for the last of them.
    rows.sort(key=starts.__getitem__, reverse=True)
    launches = [Launch(rows, prefills, verifies=Kind.VERIFY in kinds), Launch(prefills=sorted(apart), scores=True)]
    return [launch for launch in launches if launch.indices]


class Packer:
    """Fills the integers of a launch. Knows how long the page tables of each slot are, which the device does not."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._table_lengths = [[0] * shapes.num_groups for _ in range(shapes.num_slots + 1)]
        self._tables: PageTables | None = None
        if shapes.shared_groups:
            self._tables = PageTables(shapes.num_slots, shapes.table_size, shapes.page_size, shapes.shared_groups)

    def start(self, slot: int, new_pages: tuple[tuple[int, ...], ...]) -> None:
        """The slot begins with these pages, which are placed with the rest of its state."""
        self._table_lengths[slot] = [len(pages) for pages in new_pages] or [0] * self._shapes.num_groups
        if self._tables is not None:
            self._tables.start(slot, new_pages)

    def with_shared(self, launch: Launch, chunks: Sequence[Chunk]) -> Launch:
        """The launch with the tiles of rows that read shared pages together."""
        if self._tables is None or not launch.rows:
            return launch
        slots = np.array([chunks[index].slot for index in launch.rows], np.int32)
        starts = np.array([chunks[index].start for index in launch.rows], np.int32)
        return replace(launch, shared=self._tables.find(slots, starts))

    def pack(self, launch: Launch, chunks: Sequence[Chunk], started: set[int], shape: StepShape) -> Ints:
        """The inputs of the forward pass. The first pages of slots in `started` are on the device already."""
        packed = np.zeros(sum(sizes(shape, self._shapes)), np.int32)
        into = fields(packed, shape, self._shapes)
        for slots in (into.slots, into.tile_slots, into.page_slots):
            slots.fill(self._shapes.num_slots)
        for numbers in (into.positions, into.shared_tile_of, into.shared_tokens):
            numbers.fill(-1)
        those = [chunks[index] for index in launch.indices]
        if not those:
            return packed
        count = len(launch.rows)
        columns = Chunk(*zip(*those, strict=True))  # type: ignore[arg-type]
        slots = np.array(columns.slot, np.int32)
        starts = self._starts(columns, launch.offset)
        lengths = np.array(columns.length, np.int32)
        num_new, lengths[:count] = lengths[:count] - launch.offset, 1  # a decode is one token, also in a burst
        ends = np.cumsum(lengths, dtype=np.int32)
        into.slots[: ends[-1]] = np.repeat(slots, lengths)
        into.positions[: ends[-1]] = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        samples = np.array(columns.samples)
        order = np.argsort(~samples, kind="stable")  # of `Launch.samples`
        last = ends[order] - 1
        if launch.verifies:
            last = _each_of([num_samples(those[index]) for index in order], last)
        into.ends[: len(last)] = last
        if shape.decodes_only:
            into.num_new[:count] = np.where(samples, num_new, 0)
        else:
            self._pack_tiles(into, count, slots, starts, lengths, ends, num_single(shape, self._shapes))
        if shape.fresh_sequences:
            into.fresh_offsets.fill(-1)
            into.fresh_lengths.fill(-1)
            into.fresh_offsets[: len(those)] = ends - lengths
            into.fresh_lengths[: len(those)] = lengths
        if launch.shared is not None and len(into.shared_tile_of):
            for whole, part in zip(into[-4:], launch.shared, strict=True):
                whole[: part.size] = part.reshape(-1)
        if not launch.offset:  # the first launch of a burst brings the pages
            new = [chunk for chunk, pages in zip(those, columns.new_pages, strict=True) if pages]
            self._pack_pages(into, [chunk for chunk in new if chunk.slot not in started])
        return packed

    def _starts(self, columns: Chunk, offset: int) -> Ints:
        """The position of each chunk's first token that is not computed."""
        starts = np.array(columns.start, np.int32) + np.int32(offset)
        if self._shapes.guesses:
            kinds = np.array(columns.kind)
            starts[(kinds == Kind.DECODE) | (kinds == Kind.VERIFY)] = FROM_THE_LAST
        return starts

    @staticmethod
    def _pack_tiles(into: Inputs, rows: int, slots: Ints, starts: Ints, lengths: Ints, ends: Ints, first: int) -> None:
        """The single tokens at the front, the tiles of prefills from `first` on."""
        counts = -(-lengths[rows:] // TILE)
        last = first + int(counts.sum())
        within = TILE * (np.arange(last - first) - np.repeat(np.cumsum(counts) - counts, counts))
        # Those with the longest contexts begin first here too.
        order = np.argsort(-(np.repeat(starts[rows:], counts) + within), kind="stable")
        values = (
            (into.tile_slots, slots[:rows], np.repeat(slots[rows:], counts)),
            (into.tile_starts, starts[:rows], np.repeat(starts[rows:], counts) + within),
            (into.tile_lengths, 1, np.minimum(np.repeat(lengths[rows:], counts) - within, TILE)),
            (into.tile_offsets, np.arange(rows), np.repeat((ends - lengths)[rows:], counts) + within),
        )
        for array, single, tiles in values:
            array[:rows] = single
            array[first:last] = tiles[order]

    def new_entries(self, chunks: Iterable[Chunk]) -> list[tuple[int, int, int, int]]:
        """The entries that chunks add to page tables: slot, group, index and page."""
        return [
            (chunk.slot, group, index, page)
            for chunk in chunks
            for group, pages in enumerate(chunk.new_pages)
            for index, page in enumerate(pages, self._table_lengths[chunk.slot][group])
        ]

    def _pack_pages(self, into: Inputs, chunks: list[Chunk]) -> None:
        updates = self.new_entries(chunks)
        for chunk in chunks:
            for group, pages in enumerate(chunk.new_pages):
                self._table_lengths[chunk.slot][group] += len(pages)
            if self._tables is not None:
                self._tables.append(chunk.slot, chunk.new_pages)
        if updates:
            columns = (into.page_slots, into.page_groups, into.page_indices, into.pages)
            for column, values in zip(columns, np.array(updates, np.int32).T, strict=True):
                column[: len(updates)] = values

    def pack_samples(self, launch: Launch, chunks: Sequence[Chunk], size: int, features: Sequence[Any]) -> Ints:
        """The inputs of sampling: of `size` tokens to sample their slots and positions, whether they are sampled and
        how many guesses are before them; the features."""
        fields = num_sample_fields(self._shapes.guesses > 0)
        packed = np.zeros(fields * size + NUM_FEATURES, np.int32)
        slots, positions, samples, *guesses = packed[: fields * size].reshape(fields, size)
        slots.fill(self._shapes.num_slots)
        those = [chunk for chunk in (chunks[index] for index in launch.samples(chunks)) if chunk.samples]
        lasts = [launch.offset if chunk.kind is Kind.DECODE else chunk.length - 1 for chunk in those]
        if guesses:
            counts = [num_samples(chunk) for chunk in those]
            columns = Chunk(*zip(*those, strict=True))  # type: ignore[arg-type]
            ends = self._starts(columns, 0) + np.array(lasts, np.int32) - launch.offset
            count = sum(counts)
            slots[:count], samples[:count] = np.repeat(columns.slot, counts), 1
            positions[:count] = _each_of(counts, ends)
            guesses[0][:count] = _each_of(counts, np.array(counts) - 1)
        else:
            slots[: len(those)] = [chunk.slot for chunk in those]
            positions[: len(those)] = [chunk.start + last for chunk, last in zip(those, lasts, strict=True)]
            samples[: len(those)] = 1
        packed[fields * size :] = features
        return packed


def num_sample_fields(guesses: bool) -> int:
    """Integers of each token to sample, in the packed array of the sampler; one more where tokens are guessed."""
    return 4 if guesses else 3


def num_samples(chunk: Chunk) -> int:
    """Tokens that a chunk of one launch samples: one, or one after each of its tokens if those are guesses."""
    return chunk.length if chunk.kind is Kind.VERIFY else int(chunk.samples)


def _each_of(counts: Sequence[int], last: Ints) -> Ints:
    """For each of `last` the last `count` numbers up to it, ascending; one where the count is 0."""
    repeats = np.maximum(np.array(counts, np.int32), 1)
    ends = np.cumsum(repeats, dtype=np.int32)
    every: Ints = np.arange(ends[-1], dtype=np.int32) + np.repeat(last + 1 - ends, repeats)
    return every


def num_sampling(launch: Launch, chunks: Sequence[Chunk]) -> int:
    """Tokens that a launch samples."""
    if launch.verifies:
        return sum(num_samples(chunks[index]) for index in launch.indices)
    return sum(chunks[index].samples for index in launch.indices)
