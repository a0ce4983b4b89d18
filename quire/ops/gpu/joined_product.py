"""Products with adapters whose `a` is joined to the weight, so that only the product with `b` is a launch of its own.

As in `adapter_product`, every row of a tile is multiplied by the adapters of a group, and keeps the product with its
own. The launch that adds the products can gate them too, which saves one of XLA's.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.adapter_blocks import Blocks, blocks_of, columns_of, parts_of_blocks, rows_of
from quire.ops.gpu.tiles import array, product, whole
from quire.ops.weights import adapters
from quire.ops.weights.adapters import JoinedStack


def expand_joined(
    wide: jax.Array, rows: jax.Array, stack: JoinedStack, *, gated: bool = False, interpret: bool = False
) -> jax.Array:
    """wide [t, outputs + slots * parts * rank], the product with `both`, as [t, outputs] with adapters, or [t, outputs
    / 2] where it is `gated`."""
    b = stack.flat_b
    slots, rank, num_outputs = b.shape
    blocks = blocks_of(len(rows), (slots, stack.parts, rank, 1), stack.runs, b.dtype, halves=1 + gated)
    if blocks is None:
        return adapters.add_products(wide, wide, rows, stack, gated=gated)
    part_of_block = parts_of_blocks(blocks, stack.runs)
    width = num_outputs // (1 + gated)
    operands = (wide, rows, b, jnp.asarray(part_of_block, jnp.int32))
    out = array((len(rows), width), wide.dtype)
    added: jax.Array = pl.pallas_call(
        partial(_expand, blocks, stack.parts, gated),
        grid=(-(-len(rows) // blocks.rows), width // blocks.outputs),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=2),
        interpret=interpret,
        name="adapter_expand_joined",
    )(*operands)
    return added


def _expand(
    blocks: Blocks, parts: int, gated: bool, wide_ref: Any, rows_ref: Any, b_ref: Any, part_ref: Any, out_ref: Any
) -> None:
    slots, _, num_outputs = b_ref.shape
    row, slot = rows_of(blocks, rows_ref)
    block = pl.program_id(1)
    channel = block * blocks.outputs + jnp.arange(blocks.outputs)
    mask = jnp.broadcast_to((row < rows_ref.shape[0])[:, None], (blocks.rows, blocks.outputs))
    halves = [(channel, part_ref[block])]
    if gated:
        up = num_outputs // 2 // blocks.outputs
        halves.append((channel + num_outputs // 2, part_ref[block + up]))
    bases = [plgpu.load(wide_ref.at[row[:, None], at[None, :]], mask=mask, other=0.0) for at, _ in halves]
    is_any = slot.max(axis=0) >= 0

    def store(sums: list[jax.Array]) -> None:
        out = sums[0]
        if gated:  # of numbers that are rounded, as those of a product without adapters are
            gate, up = (total.astype(jnp.float32) for total in sums)
            out = (gate / (1.0 + jnp.exp(-gate)) * up).astype(out_ref.dtype)
        plgpu.store(out_ref.at[row[:, None], channel[None, :]], out, mask=mask)

    @pl.when(jnp.logical_not(is_any))
    def copy() -> None:
        store(bases)

    @pl.when(is_any)
    def compute() -> None:
        totals = [_total(blocks, parts, slots, row, slot, half, wide_ref, b_ref) for half in halves]
        sums = (base.astype(jnp.float32) + total for base, total in zip(bases, totals, strict=True))
        store([total.astype(wide_ref.dtype) for total in sums])


def _total(
    blocks: Blocks,
    parts: int,
    slots: int,
    row: jax.Array,
    slot: jax.Array,
    half: tuple[jax.Array, Any],
    wide_ref: Any,
    b_ref: Any,
) -> jax.Array:
    """The products [rows, outputs] of the rows of a tile, some of which have adapters, with `b`."""
    (channel, part), has_one = half, slot >= 0
    _, rank, num_outputs = b_ref.shape
    each = jnp.arange(blocks.room)
    where = num_outputs + (jnp.maximum(slot, 0) * parts + part)[:, None] * rank + each[None, :]
    small = plgpu.load(wide_ref.at[row[:, None], where], mask=has_one[:, None] & (each < rank)[None, :], other=0.0)
    small = small.astype(b_ref.dtype)
    copies = jnp.broadcast_to(small[:, None, :], (blocks.rows, blocks.slots, blocks.room))
    copies = copies.reshape(blocks.rows, blocks.slots * blocks.room)

    def of_group(group: Any) -> jax.Array:
        columns = columns_of(blocks, group, slot, rank)
        mask = jnp.broadcast_to(columns.read[:, None], (len(columns.read), blocks.outputs))
        place = b_ref.at[columns.slot[:, None], columns.rank[:, None], channel[None, :]]
        weights = plgpu.load(place, mask=mask, other=0.0)
        return product(jnp.where(columns.own, copies, 0), weights, 0)

    if slots <= blocks.slots:
        return of_group(0)
    first = jax.lax.div(jnp.where(has_one, slot, slots).min(axis=0), blocks.slots)
    end = jax.lax.div(slot.max(axis=0), blocks.slots) + 1
    total: jax.Array = jax.lax.fori_loop(first + 1, end, lambda at, total: total + of_group(at), of_group(first))
    return total
