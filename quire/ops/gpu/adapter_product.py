"""Products with adapters, in two launches: `shrink` multiplies by a, `expand` by b.

Rows stay where they are. Adapters are read in groups of neighbouring slots, and of a group those alone that rows of the
tile have: every row is multiplied by all of them, and keeps the product with its own. Sums over the inputs are cut into
splits, so that a step of few rows still occupies the device; `expand` adds the splits up, always in the same order. A
tile of rows without adapters ends at once.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops import adapters
from quire.ops.adapters import AdapterStack, Runs
from quire.ops.gpu.tiles import array, power_of_two, product, whole

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


def blocks_of(tokens: int, shape: tuple[int, ...], runs: Runs, dtype: Any) -> Blocks | None:
    """The blocks for an `a` [slots, parts, rank, inputs]; None for heads that no product of blocks fits."""
    slots, parts, rank, inputs = shape
    outputs, num_outputs = _common(runs), sum(length for length, _ in runs)
    if outputs < LEAST:
        return None
    is_short = jnp.dtype(dtype).itemsize == 2
    room = max(LEAST, power_of_two(rank))
    share = max(1, room // COLUMNS)  # blocks of a rank above that are as much smaller
    rows = max(LEAST, min(power_of_two(tokens), (MAX_ROWS if is_short else LEAST) // share))
    slots_together = max(1, min(COLUMNS // room, power_of_two(slots)))
    tiles, groups = -(-tokens // rows), -(-slots // slots_together)
    most = min(MAX_SPLITS, inputs // SPLIT_INPUTS, PROGRAMS // (tiles * parts * groups), MAX_SUMS // (rows * room))
    splits = 1 << (max(1, most).bit_length() - 1)
    outputs = max(LEAST, min(outputs, (MAX_OUTPUTS if is_short else MAX_OUTPUTS // 2) // share))
    while outputs > MIN_OUTPUTS and tiles * num_outputs // outputs < PROGRAMS // 2:
        outputs //= 2
    block = max(LEAST, min((64 if is_short else 32) // share, power_of_two(inputs)))
    return Blocks(rows, slots_together, room, block, splits, outputs)


def add_products(
    out: jax.Array,
    x: jax.Array,
    rows: jax.Array,
    stack: AdapterStack,
    *,
    gated: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """An `AdapterProduct` for one NVIDIA GPU."""
    a, b = stack.flat
    blocks = blocks_of(len(rows), a.shape, stack.runs, x.dtype)
    if blocks is None:
        return adapters.add_products(out, x, rows, stack, gated=gated)
    if gated:
        x = (jax.nn.silu(x[:, 0].astype(jnp.float32)) * x[:, 1].astype(jnp.float32)).astype(x.dtype)
    slots, parts, _, _ = a.shape
    tiles, groups = -(-len(rows) // blocks.rows), -(-slots // blocks.slots)
    sums = array((len(rows), parts, blocks.room, blocks.splits), jnp.float32)
    operands: tuple[jax.Array, ...] = (x, rows, a)
    small = pl.pallas_call(
        partial(_shrink, blocks),
        grid=(tiles, parts * groups, blocks.splits),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(sums),
        out_shape=sums,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="adapter_shrink",
    )(*operands)
    part_of_block = np.repeat([part for _, part in stack.runs], [length // blocks.outputs for length, _ in stack.runs])
    operands = (out, small, rows, b, jnp.asarray(part_of_block, jnp.int32))
    added: jax.Array = pl.pallas_call(
        partial(_expand, blocks, x.dtype),
        grid=(tiles, len(part_of_block)),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(out),
        out_shape=array(out.shape, out.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=interpret,
        name="adapter_expand",
    )(*operands)
    return added


def _common(runs: Runs) -> int:
    """The outputs of a block at most: a power of two that divides every run."""
    common = math.gcd(*(length for length, _ in runs))
    return min(MAX_OUTPUTS, common & -common)


class _Columns(NamedTuple):
    """The columns of a group: the ranks of its slots, one slot after the other."""

    slot: jax.Array  # [c]
    rank: jax.Array  # [c]
    own: jax.Array  # bool [rows, c]: of the adapter that a row has
    read: jax.Array  # bool [c]: of an adapter that some row has, and within its rank


def _columns(blocks: Blocks, group: Any, slot: jax.Array, rank: int) -> _Columns:
    """The columns of a group for rows with these slots, -1 for none."""
    column = jnp.arange(blocks.slots * blocks.room)
    own_slot = group * blocks.slots + jax.lax.div(column, blocks.room)
    own_rank = jax.lax.rem(column, blocks.room)
    own = slot[:, None] == own_slot[None, :]
    return _Columns(own_slot, own_rank, own, (own.astype(jnp.int32).max(axis=0) > 0) & (own_rank < rank))


def _rows_of(blocks: Blocks, rows_ref: Any) -> tuple[jax.Array, jax.Array]:
    """The rows of this program's tile, and their slots: -1 for rows without an adapter."""
    row = pl.program_id(0) * blocks.rows + jnp.arange(blocks.rows)
    return row, plgpu.load(rows_ref.at[row], mask=row < rows_ref.shape[0], other=0) - 1


def _shrink(blocks: Blocks, x_ref: Any, rows_ref: Any, a_ref: Any, small_ref: Any) -> None:
    _, parts, rank, inputs = a_ref.shape
    part, group = jax.lax.rem(pl.program_id(1), parts), jax.lax.div(pl.program_id(1), parts)
    split = pl.program_id(2)
    row, slot = _rows_of(blocks, rows_ref)
    columns = _columns(blocks, group, slot, rank)
    is_here = columns.own.astype(jnp.int32).max(axis=1) > 0
    num_blocks = -(-inputs // (blocks.inputs * blocks.splits))  # of a split

    @pl.when(is_here.astype(jnp.int32).max(axis=0) > 0)
    def compute() -> None:
        def add(index: jax.Array, total: jax.Array) -> jax.Array:
            at = (split * num_blocks + index) * blocks.inputs + jnp.arange(blocks.inputs)
            real = (at < inputs)[None, :]
            some = plgpu.load(x_ref.at[row[:, None], at[None, :]], mask=is_here[:, None] & real, other=0.0)
            where = a_ref.at[columns.slot[:, None], part, columns.rank[:, None], at[None, :]]
            weights = plgpu.load(where, mask=columns.read[:, None] & real, other=0.0)
            return total + product(some, weights.astype(some.dtype), 1)

        none = jnp.zeros((blocks.rows, blocks.slots * blocks.room), jnp.float32)
        total = jax.lax.fori_loop(0, num_blocks, add, none)
        kept = jnp.where(columns.own, total, 0.0).reshape(blocks.rows, blocks.slots, blocks.room).sum(axis=1)
        mask = jnp.broadcast_to(is_here[:, None], kept.shape)
        plgpu.store(small_ref.at[row[:, None], part, jnp.arange(blocks.room)[None, :], split], kept, mask=mask)


def _expand(
    blocks: Blocks, dtype: Any, out_ref: Any, small_ref: Any, rows_ref: Any, b_ref: Any, part_ref: Any, added_ref: Any
) -> None:
    slots, rank, _ = b_ref.shape
    row, slot = _rows_of(blocks, rows_ref)
    channel = pl.program_id(1) * blocks.outputs + jnp.arange(blocks.outputs)
    part, has_one = part_ref[pl.program_id(1)], slot >= 0

    @pl.when(slot.max(axis=0) >= 0)
    def compute() -> None:
        def columns_and_weights(group: Any) -> tuple[_Columns, jax.Array]:
            columns = _columns(blocks, group, slot, rank)
            where = b_ref.at[columns.slot[:, None], columns.rank[:, None], channel[None, :]]
            mask = jnp.broadcast_to(columns.read[:, None], (len(columns.read), blocks.outputs))
            return columns, plgpu.load(where, mask=mask, other=0.0).astype(dtype)

        is_one_group = slots <= blocks.slots
        first = 0 if is_one_group else jax.lax.div(jnp.where(has_one, slot, slots).min(axis=0), blocks.slots)
        # All that the first product needs is asked for before anything is waited for.
        columns, weights = columns_and_weights(first)
        mask = jnp.broadcast_to(has_one[:, None], (blocks.rows, blocks.outputs))
        base = plgpu.load(out_ref.at[row[:, None], channel[None, :]], mask=mask, other=0.0)
        small = _sum_of_splits(blocks, small_ref, row, part, has_one).astype(dtype)
        copies = jnp.broadcast_to(small[:, None, :], (blocks.rows, blocks.slots, blocks.room))
        copies = copies.reshape(blocks.rows, blocks.slots * blocks.room)
        total = product(jnp.where(columns.own, copies, 0), weights, 0)

        def add(group: Any, total: jax.Array) -> jax.Array:
            columns, weights = columns_and_weights(group)
            return total + product(jnp.where(columns.own, copies, 0), weights, 0)

        if not is_one_group:
            end = jax.lax.div(slot.max(axis=0), blocks.slots) + 1
            total = jax.lax.fori_loop(first + 1, end, add, total)
        added = (base.astype(jnp.float32) + total).astype(added_ref.dtype)
        plgpu.store(added_ref.at[row[:, None], channel[None, :]], added, mask=mask)


def _sum_of_splits(blocks: Blocks, small_ref: Any, row: jax.Array, part: Any, has_one: jax.Array) -> jax.Array:
    """The sums [rows, room] over the splits, always in the same order."""
    where = row[:, None, None], part, jnp.arange(blocks.room)[None, :, None], jnp.arange(blocks.splits)[None, None, :]
    mask = jnp.broadcast_to(has_one[:, None, None], (blocks.rows, blocks.room, blocks.splits))
    return plgpu.load(small_ref.at[where], mask=mask, other=0.0).sum(axis=2)
