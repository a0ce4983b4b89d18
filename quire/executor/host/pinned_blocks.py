"""Blocks of pages in pinned host memory, and the program that fills them on the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from quire.executor.host.host_pages import BlockArrays, Stack, gather_blocks
from quire.ops.page_moves import PageMoves

SPLIT_SIZES = (2, 12, 16, 64)  # pages that one call can copy to pinned memory, and from it
PLACE_SIZES = (*SPLIT_SIZES, 192)
# On the device, of pages that came from the host and are not in their places, wanted or not. More than the pages that a
# step restores, which are in blocks with others.
MAX_UNPLACED_BYTES = 768 * 2**20
PINNED_KINDS = ("split", "place")  # programs for pages on their way to the host and from it
PINNED, DEVICE = "pinned_host", "device"  # kinds of memory, as JAX names them
BLOCK_PAGES = 16  # at most
SMALL_BLOCKS = {2: 1, 12: 4}  # pages of a block, by the pages of a program that has smaller ones


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


def split_pages(moves: PageMoves, stacks: Sequence[Stack], pages: Any, sources: jax.Array) -> list[BlockArrays]:
    """The contents of some pages, in blocks."""
    return gather_blocks(moves, stacks, pages, sources, block_pages(sources.shape[0]))


class PinnedBlock:
    """Pages that go to the host together."""

    __slots__ = ("arrays", "num_used", "size")

    def __init__(self, arrays: BlockArrays, size: int) -> None:
        self.arrays = arrays  # in pinned memory, or on the device until they are copied there
        self.size = size
        self.num_used = 0  # pages of the host that are here

    def result(self) -> None:
        """Nothing to wait for: what reads it waits for it. `take_lost` tells when it has failed."""

    @property
    def has_ended(self) -> bool:
        """True if its contents are there, or have failed."""
        arrays: list[Any] = self.arrays
        return all(array.is_deleted() or array.is_ready() for array in arrays)  # a deleted array cannot be asked


class BlockRow(NamedTuple):
    block: PinnedBlock
    row: int
