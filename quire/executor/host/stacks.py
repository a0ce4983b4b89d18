"""Pages on their way between the device and the host: how many go together, their layout, and the functions that
programs gather and scatter them with.

A page of the host has the same bytes as a page of the device: those of every layer, of the draft as well. Page arrays
of one shape are stacked, so that a program has one array of the host for all of them, [pages, arrays, page_size, ...],
in which the bytes of a page are together. In pinned memory a few pages make a block: an array for each stack.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from quire.ops.page_moves import PageMoves

HOST_COPY_SIZES = (1, 4, 16)  # pages that one call can copy between the device and the host
SPLIT_SIZES = (2, 12, 16, 64)  # pages that one call can copy to pinned memory, and from it
PLACE_SIZES = (*SPLIT_SIZES, 192)
# On the device, of pages that came from the host and are not in their places, wanted or not. More than the pages that a
# step restores, which are in blocks with others.
MAX_UNPLACED_BYTES = 768 * 2**20
BLOCK_PAGES = 16  # at most
SMALL_BLOCKS = {2: 1, 12: 4}  # pages of a block, by the pages of a program that has smaller ones
PINNED, DEVICE = "pinned_host", "device"  # kinds of memory, as JAX names them

BlockArrays = list[jax.Array]  # one for each stack: [pages, arrays, page_size, ...]


class Stack(NamedTuple):
    """Page arrays of one shape."""

    members: tuple[int, ...]  # among the leaves of the page arrays
    names: tuple[str, ...]  # of these
    shape: tuple[int, ...]  # of one page: [arrays, page_size, ...]
    dtype: Any
    sharding: NamedSharding | None  # of several pages

    @property
    def num_bytes(self) -> int:
        """Bytes of one page in this stack."""
        return prod(self.shape) * int(np.dtype(self.dtype).itemsize)

    def like(self, num_pages: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_pages, *self.shape), self.dtype, sharding=self.sharding)  # type: ignore[no-untyped-call]


def stacks_of(pages: Any) -> list[Stack]:
    """`pages` are page arrays, or their structure."""
    members: dict[Any, list[int]] = {}
    names = []
    for index, (path, leaf) in enumerate(jax.tree.leaves_with_path(pages)):
        names.append(jax.tree_util.keystr(path, simple=True, separator="."))
        where = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
        members.setdefault((leaf.shape[1:], leaf.dtype, where), []).append(index)
    stacks = []
    for (shape, dtype, where), indices in members.items():
        if where is not None:
            spec = PartitionSpec(None, None, *where.spec[1:])  # type: ignore[no-untyped-call]
            where = NamedSharding(where.mesh, spec)
        named = tuple(names[index] for index in indices)
        stacks.append(Stack(tuple(indices), named, (len(indices), *shape), dtype, where))
    return stacks


def memory_of(stack: Stack, kind: str) -> Sharding:
    """The place of some pages of a stack in memory of this kind."""
    if stack.sharding is None:
        return SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)
    return NamedSharding(stack.sharding.mesh, stack.sharding.spec, memory_kind=kind)


def block_pages(num_pages: int) -> int:
    """Pages in each of the blocks that a program for `num_pages` makes or takes."""
    return SMALL_BLOCKS.get(num_pages, BLOCK_PAGES)


def place_sizes(page_bytes: int) -> tuple[int, ...]:
    """The pages that one call can put into place: no more than there may be."""
    return tuple(size for size in PLACE_SIZES if size in SPLIT_SIZES or size * page_bytes <= MAX_UNPLACED_BYTES)


def blocks_like(stacks: Sequence[Stack], num_pages: int) -> list[list[jax.ShapeDtypeStruct]]:
    """The structure of the blocks of `num_pages` on the device."""
    rows = block_pages(num_pages)
    block = [
        jax.ShapeDtypeStruct((rows, *stack.shape), stack.dtype, sharding=memory_of(stack, DEVICE))  # type: ignore[no-untyped-call]
        for stack in stacks
    ]
    return [block] * (num_pages // rows)


def gather_pages(moves: PageMoves, stacks: Sequence[Stack], pages: Any, sources: jax.Array) -> BlockArrays:
    """The contents of some pages, stacked."""
    (block,) = gather_blocks(moves, stacks, pages, sources, sources.shape[0])
    return block


def gather_blocks(
    moves: PageMoves, stacks: Sequence[Stack], pages: Any, sources: jax.Array, rows: int
) -> list[BlockArrays]:
    """The same in blocks of so many pages."""
    leaves = jax.tree.leaves(pages)
    gathered = [moves.gather([leaves[index] for index in stack.members], sources, rows) for stack in stacks]
    return [list(block) for block in zip(*gathered, strict=True)]


def split_pages(moves: PageMoves, stacks: Sequence[Stack], pages: Any, sources: jax.Array) -> list[BlockArrays]:
    """The contents of some pages, in blocks."""
    return gather_blocks(moves, stacks, pages, sources, block_pages(sources.shape[0]))


def scatter_pages(
    moves: PageMoves, stacks: Sequence[Stack], pages: Any, targets: jax.Array, stacked: BlockArrays
) -> tuple[Any, jax.Array]:
    """The page arrays with `stacked` in some pages, and a number that is there when they are."""
    return scatter_blocks(moves, stacks, pages, targets, [stacked])


def scatter_blocks(
    moves: PageMoves, stacks: Sequence[Stack], pages: Any, targets: jax.Array, blocks: Sequence[BlockArrays]
) -> tuple[Any, jax.Array]:
    """The same with the pages of `blocks`."""
    leaves, structure = jax.tree.flatten(pages)
    for stack, contents in zip(stacks, zip(*blocks, strict=True), strict=True):
        written = moves.scatter([leaves[index] for index in stack.members], targets, contents)
        for index, leaf in zip(stack.members, written, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves), targets[-1]


def as_bytes(parts: Sequence[tuple[int, Sequence[jax.Array]]]) -> memoryview:
    """The bytes of pages, one after the other: those of each stack in order. `parts` are numbers of pages, and stacks
    with at least so many rows."""
    rows = [
        np.concatenate([np.asarray(array)[:count].reshape(count, -1).view(np.uint8) for array in stacks], axis=1)
        for count, stacks in parts
    ]
    return memoryview(np.concatenate(rows).reshape(-1).data) if rows else memoryview(b"")
