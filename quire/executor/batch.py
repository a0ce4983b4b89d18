"""A launch's inputs: the chunks of a plan, laid out for a bucket in one small array of integers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from quire.core.plan import Chunk, Kind
from quire.executor.buckets import GROUP_SIZE, Bucket

NUM_FEATURES = 5

Ints = np.ndarray[Any, np.dtype[np.int32]]


class Inputs(NamedTuple):
    """What a launch is told. Padding has slot `num_slots`, the one that nobody owns."""

    row_slots: jax.Array  # [rows]
    row_positions: jax.Array  # [rows]; -1: padding
    row_pages: jax.Array  # [rows]: the next page that begins, at this position or after it, or 0
    group_slots: jax.Array  # [groups]
    group_starts: jax.Array  # [groups]
    group_lengths: jax.Array  # [groups]; 0: padding
    page_slots: jax.Array  # [updates]: page table entries that groups add
    page_indices: jax.Array  # [updates]
    pages: jax.Array  # [updates]


def num_groups(chunk: Chunk) -> int:
    return -(-chunk.length // GROUP_SIZE)


def num_updates(bucket: Bucket, page_size: int) -> int:
    """As many new pages as the groups of a launch can need."""
    return bucket.groups * (GROUP_SIZE // page_size + 1)


def sizes(bucket: Bucket, page_size: int) -> list[int]:
    updates = num_updates(bucket, page_size)
    return [bucket.rows] * 3 + [bucket.groups] * 3 + [updates] * 3


def unpack(packed: jax.Array, bucket: Bucket, page_size: int) -> Inputs:
    """The fields of a packed array; the sizes are constants of the compiled step."""
    parts, start = [], 0
    for size in sizes(bucket, page_size):
        parts.append(packed[start : start + size])
        start += size
    return Inputs(*parts)


@dataclass
class Launch:
    """Chunks of a plan, by their index in it, that run together."""

    rows: list[int] = field(default_factory=list)  # single tokens
    fills: list[int] = field(default_factory=list)  # longer ones
    num_groups: int = 0
    scores: bool = False
    offset: int = 0  # so many tokens of each chunk were computed by launches before


def split(chunks: tuple[Chunk, ...], scored: set[int], max_groups: int, max_scored_groups: int) -> list[Launch]:
    """The launches of a plan: one, unless its prefills need more groups than the largest bucket has, or log-
    probabilities of prompts are wanted, which run apart and are cut so that each launch scores whole chunks."""
    launches = [Launch()]
    scoring: list[Launch] = []
    for index, chunk in enumerate(chunks):
        if (chunk.kind is Kind.DECODE or chunk.length == 1) and index not in scored:
            launches[0].rows.append(index)
            continue
        groups = num_groups(chunk)
        if index in scored:
            if not scoring or scoring[-1].num_groups + groups > max_scored_groups:
                scoring.append(Launch(scores=True))
            scoring[-1].fills.append(index)
            scoring[-1].num_groups += groups
        else:
            if launches[-1].num_groups + groups > max_groups:
                launches.append(Launch())
            launches[-1].fills.append(index)
            launches[-1].num_groups += groups
    # Those who read the most begin first, or the device would wait for the last of them.
    launches[0].rows.sort(key=lambda index: chunks[index].start, reverse=True)
    return [launch for launch in launches if launch.rows or launch.fills] + scoring


class Packer:
    """Fills the integers of a launch. Knows how many pages each slot's table has, which the device does not count."""

    def __init__(self, num_slots: int, page_size: int) -> None:
        self._num_slots = num_slots
        self._page_size = page_size
        self._table_lengths = [0] * (num_slots + 1)

    def start(self, slot: int, num_pages: int) -> None:
        """The slot begins with so many pages, which are placed with the rest of its state."""
        self._table_lengths[slot] = num_pages

    def pack(self, launch: Launch, chunks: tuple[Chunk, ...], started: set[int], bucket: Bucket) -> Ints:
        """The inputs of the forward pass. The first pages of slots in `started` are on the device already."""
        arrays = [np.zeros(size, np.int32) for size in sizes(bucket, self._page_size)]
        self._pack_rows(arrays[:3], launch, chunks, started)
        self._pack_groups(arrays[3:], launch, chunks, started)
        return np.concatenate(arrays)

    def pack_decodes(self, launch: Launch, chunks: tuple[Chunk, ...], started: set[int], bucket: Bucket) -> Ints:
        """The inputs of rows that one program computes and samples: those of the forward pass, and how many tokens each
        gets. A chunk that does not reach the end of the known tokens gets none."""
        packed = np.zeros((4, bucket.rows), np.int32)
        self._pack_rows(list(packed[:3]), launch, chunks, started)
        those = [chunks[index] for index in launch.rows]
        packed[3, : len(those)] = [chunk.length - launch.offset if chunk.samples else 0 for chunk in those]
        return packed

    def pack_samples(self, launch: Launch, chunks: tuple[Chunk, ...], bucket: Bucket, features: Sequence[Any]) -> Ints:
        """The inputs of sampling."""
        size = bucket.num_samples
        packed = np.zeros(3 * size + NUM_FEATURES, np.int32)
        slots, positions, counts = packed[: 3 * size].reshape(3, size)
        slots.fill(self._num_slots)
        pairs = sampled_rows(chunks, launch, bucket)
        rows = [row for row, _ in pairs]
        those = [chunks[index] for _, index in pairs]
        slots[rows] = [chunk.slot for chunk in those]
        ends = ((0 if chunk.kind is Kind.DECODE else chunk.length - 1) for chunk in those)
        positions[rows] = [chunk.start + launch.offset + end for chunk, end in zip(those, ends, strict=True)]
        counts[rows] = [chunk.samples for chunk in those]
        packed[3 * size :] = features
        return packed

    def _pack_rows(self, arrays: list[Ints], launch: Launch, chunks: tuple[Chunk, ...], started: set[int]) -> None:
        slots, positions, pages = arrays
        slots.fill(self._num_slots)
        positions.fill(-1)
        if not launch.rows:
            return
        those = [chunks[index] for index in launch.rows]
        slots[: len(those)] = [chunk.slot for chunk in those]
        positions[: len(those)] = [chunk.start + launch.offset for chunk in those]
        if launch.offset:
            return  # the first launch brought the pages
        for row, chunk in enumerate(those):
            if chunk.new_pages and chunk.slot not in started:
                ((pages[row],),) = chunk.new_pages
                self._table_lengths[chunk.slot] += 1

    def _pack_groups(self, arrays: list[Ints], launch: Launch, chunks: tuple[Chunk, ...], started: set[int]) -> None:
        slots, starts, lengths, page_slots, page_indices, pages = arrays
        slots.fill(self._num_slots)
        page_slots.fill(self._num_slots)
        group = update = 0
        for index in launch.fills:
            chunk = chunks[index]
            count = num_groups(chunk)
            these = slice(group, group + count)
            offsets = np.arange(count, dtype=np.int32) * GROUP_SIZE
            slots[these] = chunk.slot
            starts[these] = chunk.start + offsets
            lengths[these] = np.minimum(chunk.length - offsets, GROUP_SIZE)
            group += count
            if chunk.new_pages and chunk.slot not in started:
                there = self._table_lengths[chunk.slot]
                (new_pages,) = chunk.new_pages
                new = slice(update, update + len(new_pages))
                page_slots[new] = chunk.slot
                page_indices[new] = np.arange(there, there + len(new_pages))
                pages[new] = new_pages
                update += len(new_pages)
                self._table_lengths[chunk.slot] += len(new_pages)


def sampled_rows(chunks: tuple[Chunk, ...], launch: Launch, bucket: Bucket) -> list[tuple[int, int]]:
    """Where each chunk's sample stands: (row of the launch's samples, index of the chunk)."""
    if bucket.alone:
        return list(enumerate(launch.fills))
    pairs = list(enumerate(launch.rows))
    group = bucket.rows - 1
    for index in launch.fills:
        group += num_groups(chunks[index])
        pairs.append((group, index))
    return pairs
