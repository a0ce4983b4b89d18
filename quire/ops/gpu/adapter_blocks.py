"""Blocks of the kernels for adapters, and the groups of adapters that they read together."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import power_of_two
from quire.ops.weights.adapters import Runs

LEAST = 16  # on each side of a product of blocks
MAX_ROWS = 64  # of a tile
COLUMNS = 128  # of a group: slots * rank, unless a rank is higher
MAX_OUTPUTS, MIN_OUTPUTS = 128, 32  # of a block
SPLIT_INPUTS, MAX_SPLITS = 256, 32  # at least, at most
MAX_SUMS = 16384  # of a tile: what a program holds in registers
PROGRAMS = 256  # that occupy a device


class Blocks(NamedTuple):
    rows: int  # of a tile
    slots: int  # of a group
    room: int  # for the rank of each slot
    inputs: int  # of a block
    splits: int
    outputs: int  # of a block

    @property
    def warps(self) -> int:
        """The warps of `expand`, whose numbers stay in registers."""
        return 8 if 2 * max(self.rows * self.outputs, self.rows * self.room * self.splits) >= MAX_SUMS else 4


def blocks_of(tokens: int, shape: tuple[int, ...], runs: Runs, dtype: Any, halves: int = 1) -> Blocks | None:
    """The blocks for an `a` [slots, parts, rank, inputs]; None for outputs that no block divides. A program has a block
    of outputs in each of the `halves`."""
    slots, parts, rank, inputs = shape
    outputs, num_outputs = _common(runs), sum(length for length, _ in runs)
    if outputs < LEAST:
        return None
    is_short = jnp.dtype(dtype).itemsize == 2
    room = max(LEAST, power_of_two(rank))
    share = max(1, room // COLUMNS)  # higher ranks have smaller blocks
    rows = max(LEAST, min(power_of_two(tokens), (MAX_ROWS if is_short else LEAST) // share))
    slots_together = max(1, min(COLUMNS // room, power_of_two(slots)))
    tiles, groups = -(-tokens // rows), -(-slots // slots_together)
    most = min(MAX_SPLITS, inputs // SPLIT_INPUTS, PROGRAMS // (tiles * parts * groups), MAX_SUMS // (rows * room))
    splits = 1 << (max(1, most).bit_length() - 1)
    outputs = max(LEAST, min(outputs, (MAX_OUTPUTS if is_short else MAX_OUTPUTS // 2) // (share * halves)))
    while outputs > MIN_OUTPUTS and tiles * num_outputs // (outputs * halves) < PROGRAMS // 2:
        outputs //= 2
    block = max(LEAST, min((64 if is_short else 32) // share, power_of_two(inputs)))
    return Blocks(rows, slots_together, room, block, splits, outputs)


def parts_of_blocks(blocks: Blocks, runs: Runs) -> np.ndarray[Any, Any]:
    """The part that each block of outputs belongs to."""
    return np.repeat([part for _, part in runs], [length // blocks.outputs for length, _ in runs])


def _common(runs: Runs) -> int:
    """The most outputs of a block: a power of two that divides every run."""
    common = math.gcd(*(length for length, _ in runs))
    return min(MAX_OUTPUTS, common & -common)


class Columns(NamedTuple):
    """The columns of a group: the ranks of its slots, one slot after the other."""

    slot: jax.Array  # [c]
    rank: jax.Array  # [c]
    own: jax.Array  # bool [rows, c]: the row has this adapter
    read: jax.Array  # bool [c]: some row has this adapter, and the column is within its rank


def columns_of(blocks: Blocks, group: Any, slot: jax.Array, rank: int) -> Columns:
    """The columns of a group for rows with these slots, -1 for none."""
    column = jnp.arange(blocks.slots * blocks.room)
    own_slot = group * blocks.slots + jax.lax.div(column, blocks.room)
    own_rank = jax.lax.rem(column, blocks.room)
    own = slot[:, None] == own_slot[None, :]
    return Columns(own_slot, own_rank, own, (own.astype(jnp.int32).max(axis=0) > 0) & (own_rank < rank))


def rows_of(blocks: Blocks, rows_ref: Any) -> tuple[jax.Array, jax.Array]:
    """The rows of this program's tile, and their slots: -1 for rows without an adapter."""
    row = pl.program_id(0) * blocks.rows + jnp.arange(blocks.rows)
    return row, plgpu.load(rows_ref.at[row], mask=row < rows_ref.shape[0], other=0) - 1
