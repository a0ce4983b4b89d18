"""Products with adapters, in two launches: rows are sorted by adapter, and tiles of rows with the same one go together.

A tile that has no rows ends at once, so a step without adapters costs only the launches.
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
from quire.ops.gpu.tiles import array, least_dot, power_of_two, product, whole

TILE = 16  # rows: the least of a product of blocks
INPUTS, OUTPUTS = 128, 128  # of a block, at most


class RowTiles(NamedTuple):
    """Tiles of rows with the same adapter; those that are not needed have no rows."""

    order: jax.Array  # int32 [t]: rows by adapter
    slots: jax.Array  # int32 [tiles]
    starts: jax.Array  # int32 [tiles]: the first of a tile in `order`
    lengths: jax.Array  # int32 [tiles]


def tiles_of(rows: jax.Array, num_slots: int) -> RowTiles:
    """The tiles of rows with these adapters [t], 0 for none."""
    tokens = len(rows)
    num_tiles = -(-tokens // TILE) + min(num_slots, tokens)
    slot = jnp.where(rows > 0, rows - 1, num_slots)
    order = jnp.argsort(slot, stable=True).astype(jnp.int32)
    counts = jnp.bincount(slot, length=num_slots + 1)[:num_slots]
    firsts = jnp.cumsum(counts) - counts
    tiles = -(-counts // TILE)
    ends = jnp.cumsum(tiles)
    tile = jnp.arange(num_tiles)
    owner = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), num_slots - 1)
    within = tile - (ends - tiles)[owner]
    lengths = jnp.where(tile < ends[-1], jnp.clip(counts[owner] - within * TILE, 0, TILE), 0)
    columns = (owner, firsts[owner] + within * TILE, lengths)
    return RowTiles(order, *(column.astype(jnp.int32) for column in columns))


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
    width = _block_of(stack.runs)
    if gated or width < TILE:  # heads that no product of blocks fits
        return adapters.add_products(out, x, rows, stack, gated=gated)
    a, b = stack.flat
    slots, parts, rank, inputs = a.shape
    outputs, room = b.shape[2], least_dot(rank)
    tiles = tiles_of(rows, slots)
    num_tiles = len(tiles.slots)
    options: dict[str, Any] = {
        "compiler_params": plgpu.CompilerParams(num_warps=4, num_stages=2),
        "interpret": interpret,
    }
    operands: tuple[jax.Array, ...] = (x, *tiles, a)
    small = pl.pallas_call(
        partial(_shrink, min(INPUTS, power_of_two(inputs)), room),
        grid=(num_tiles, parts),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(array((num_tiles, parts, TILE, room), x.dtype)),
        out_shape=array((num_tiles, parts, TILE, room), x.dtype),
        name="adapter_shrink",
        **options,
    )(*operands)
    part_of_block = np.repeat([part for _, part in stack.runs], [length // width for length, _ in stack.runs])
    operands = (out, small, *tiles, b, jnp.asarray(part_of_block, jnp.int32))
    added: jax.Array = pl.pallas_call(
        partial(_expand, width),
        grid=(num_tiles, outputs // width),
        in_specs=[whole(operand) for operand in operands],
        out_specs=whole(out),
        out_shape=array(out.shape, out.dtype),
        input_output_aliases={0: 0},
        name="adapter_expand",
        **options,
    )(*operands)
    return added


def _block_of(runs: Runs) -> int:
    """Outputs of a block: a power of two that divides every run."""
    common = math.gcd(*(length for length, _ in runs))
    return min(OUTPUTS, common & -common)


def _rows_of(order_ref: Any, start: Any, length: Any) -> tuple[jax.Array, jax.Array]:
    """The rows of a tile, and which of them are real."""
    within = jnp.arange(TILE)
    real = within < length
    return plgpu.load(order_ref.at[start + within], mask=real, other=0), real


def _shrink(
    block: int,
    room: int,
    x_ref: Any,
    order_ref: Any,
    slots_ref: Any,
    starts_ref: Any,
    lengths_ref: Any,
    a_ref: Any,
    small_ref: Any,
) -> None:
    tile, part = pl.program_id(0), pl.program_id(1)
    slot, length = slots_ref[tile], lengths_ref[tile]
    _, _, rank, inputs = a_ref.shape

    @pl.when(length > 0)
    def compute() -> None:
        row, real = _rows_of(order_ref, starts_ref[tile], length)
        ranks = jnp.arange(room)

        def add(index: jax.Array, total: jax.Array) -> jax.Array:
            at = index * block + jnp.arange(block)
            some = plgpu.load(
                x_ref.at[row[:, None], at[None, :]], mask=real[:, None] & (at < inputs)[None, :], other=0.0
            )
            mask = (ranks < rank)[:, None] & (at < inputs)[None, :]
            weights = plgpu.load(a_ref.at[slot, part, ranks[:, None], at[None, :]], mask=mask, other=0.0)
            return total + product(some, weights.astype(some.dtype), 1)

        total = jax.lax.fori_loop(0, -(-inputs // block), add, jnp.zeros((TILE, room), jnp.float32))
        plgpu.store(small_ref.at[tile, part, jnp.arange(TILE)[:, None], ranks[None, :]], total.astype(small_ref.dtype))


def _expand(
    width: int,
    out_ref: Any,
    small_ref: Any,
    order_ref: Any,
    slots_ref: Any,
    starts_ref: Any,
    lengths_ref: Any,
    b_ref: Any,
    part_ref: Any,
    added_ref: Any,
) -> None:
    tile, index = pl.program_id(0), pl.program_id(1)
    slot, length, part = slots_ref[tile], lengths_ref[tile], part_ref[index]
    rank, room = b_ref.shape[1], small_ref.shape[3]

    @pl.when(length > 0)
    def compute() -> None:
        row, real = _rows_of(order_ref, starts_ref[tile], length)
        ranks, channel = jnp.arange(room), index * width + jnp.arange(width)
        small = plgpu.load(small_ref.at[tile, part, jnp.arange(TILE)[:, None], ranks[None, :]])
        weights = plgpu.load(
            b_ref.at[slot, ranks[:, None], channel[None, :]],
            mask=jnp.broadcast_to((ranks < rank)[:, None], (room, width)),
            other=0.0,
        )
        mask = jnp.broadcast_to(real[:, None], (TILE, width))
        base = plgpu.load(out_ref.at[row[:, None], channel[None, :]], mask=mask, other=0.0)
        total = base.astype(jnp.float32) + product(small, weights.astype(small.dtype), 0)
        plgpu.store(added_ref.at[row[:, None], channel[None, :]], total.astype(added_ref.dtype), mask=mask)
