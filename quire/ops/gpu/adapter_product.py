"""Products with adapters, in two launches: `shrink` multiplies by a, `expand` by b.

Rows stay where they are. Adapters are read in groups of neighbouring slots, skipping those that no row of the tile has:
every row is multiplied by all that are read, and keeps the product with its own. Sums over the inputs are split, so
that a step of few rows still occupies the device; `expand` adds the splits in a fixed order. A tile of rows without
adapters ends at once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.adapter_blocks import Blocks, Columns, blocks_of, columns_of, parts_of_blocks, rows_of
from quire.ops.gpu.joined_product import expand_joined
from quire.ops.gpu.tiles import array, product, whole
from quire.ops.weights import adapters
from quire.ops.weights.adapters import JoinedStack, Stack


def add_products(
    out: jax.Array,
    x: jax.Array,
    rows: jax.Array,
    stack: Stack,
    *,
    gated: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """An `AdapterProduct` for one NVIDIA GPU."""
    if isinstance(stack, JoinedStack):
        return expand_joined(out, rows, stack, gated=gated, interpret=interpret)
    a, b = stack.flat
    slots, parts, rank = stack.a.shape[:3]
    blocks = blocks_of(len(rows), (slots, parts, rank, a.shape[1]), stack.runs, x.dtype)
    if blocks is None:
        return adapters.add_products(out, x, rows, stack, gated=gated)
    if gated:
        x = (jax.nn.silu(x[:, 0].astype(jnp.float32)) * x[:, 1].astype(jnp.float32)).astype(x.dtype)
    tiles, groups = -(-len(rows) // blocks.rows), -(-slots // blocks.slots)
    sums = array((len(rows), parts, blocks.room, blocks.splits), jnp.float32)
    operands: tuple[jax.Array, ...] = (x, rows, a)
    small = pl.pallas_call(
        partial(_shrink, blocks, parts, rank),
        grid=(tiles, parts * groups, blocks.splits),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(sums),
        out_shape=sums,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="adapter_shrink",
    )(*operands)
    part_of_block = parts_of_blocks(blocks, stack.runs)
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


def _shrink(blocks: Blocks, parts: int, rank: int, x_ref: Any, rows_ref: Any, a_ref: Any, small_ref: Any) -> None:
    inputs = a_ref.shape[1]
    part, group = jax.lax.rem(pl.program_id(1), parts), jax.lax.div(pl.program_id(1), parts)
    split = pl.program_id(2)
    row, slot = rows_of(blocks, rows_ref)
    columns = columns_of(blocks, group, slot, rank)
    is_here = columns.own.astype(jnp.int32).max(axis=1) > 0
    num_blocks = -(-inputs // (blocks.inputs * blocks.splits))  # of a split

    @pl.when(is_here.astype(jnp.int32).max(axis=0) > 0)
    def compute() -> None:
        def add(index: jax.Array, total: jax.Array) -> jax.Array:
            at = (split * num_blocks + index) * blocks.inputs + jnp.arange(blocks.inputs)
            real = (at < inputs)[None, :]
            some = plgpu.load(x_ref.at[row[:, None], at[None, :]], mask=is_here[:, None] & real, other=0.0)
            where = a_ref.at[((columns.slot * parts + part) * rank + columns.rank)[:, None], at[None, :]]
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
    row, slot = rows_of(blocks, rows_ref)
    channel = pl.program_id(1) * blocks.outputs + jnp.arange(blocks.outputs)
    part, has_one = part_ref[pl.program_id(1)], slot >= 0

    @pl.when(slot.max(axis=0) >= 0)
    def compute() -> None:
        def columns_and_weights(group: Any) -> tuple[Columns, jax.Array]:
            columns = columns_of(blocks, group, slot, rank)
            where = b_ref.at[columns.slot[:, None], columns.rank[:, None], channel[None, :]]
            mask = jnp.broadcast_to(columns.read[:, None], (len(columns.read), blocks.outputs))
            return columns, plgpu.load(where, mask=mask, other=0.0).astype(dtype)

        is_one_group = slots <= blocks.slots
        first = 0 if is_one_group else jax.lax.div(jnp.where(has_one, slot, slots).min(axis=0), blocks.slots)
        # Load all that the first product needs before waiting for anything.
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
