"""Attention of the groups of queries that prefills are cut into, over pages.

One program computes a tile: some of a group's positions with all the queries of one key head, so that what it reads
serves as many rows of a matrix product as fit the registers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.tiles import Softmax, array, power_of_two, where_is
from quire.ops.grouped_attention import Groups

BLOCK = 64  # positions read at a time
MAX_ROWS = 128  # of a tile
# Products of float32, which tensor cores do not do, are written out: larger ones take minutes to compile.
EXACT_BLOCK, MAX_EXACT_ROWS = 32, 32


def fill_attention(
    spec: AttentionSpec,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    groups: Groups,
    *,
    block: int | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
    interpret: bool = False,
) -> jax.Array:
    """Attention of q [n, b, k, g, h]; [n, b, k, g, h]."""
    n, positions, heads, group, size = q.shape
    queries, width = power_of_two(group), power_of_two(size)
    is_exact = q.dtype == jnp.float32
    block = block or (EXACT_BLOCK if is_exact else BLOCK)
    tile = min(positions, max(1, (MAX_EXACT_ROWS if is_exact else MAX_ROWS) // queries))  # positions of a tile
    tiles = positions // tile
    tile_spec = pl.BlockSpec(
        (None, tile, None, queries, width), lambda index, head: (index // tiles, index % tiles, head, 0, 0)
    )
    whole = [pl.BlockSpec(k_pages.shape, lambda *_: (0, 0, 0, 0))] * 2
    of_group = pl.BlockSpec((None,), lambda index, head: (index // tiles,))
    out: jax.Array = pl.pallas_call(
        partial(_read, spec, group, size, k_pages.shape[1], tiles, block),
        grid=(n * tiles, heads),
        in_specs=[pl.BlockSpec(groups.page_table.shape, lambda *_: (0, 0)), of_group, of_group, tile_spec, *whole],
        out_specs=tile_spec,
        out_shape=array(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="fill_attention",
    )(groups.page_table, groups.starts, groups.lengths, q, k_pages, v_pages)
    return out


def _read(
    spec: AttentionSpec,
    group: int,
    size: int,
    page_size: int,
    tiles: int,
    block: int,
    table_ref: Any,
    start_ref: Any,
    length_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
) -> None:
    index, head = pl.program_id(0), pl.program_id(1)
    row, tile = index // tiles, index % tiles
    positions, queries, width = q_ref.shape
    start = start_ref[...] + tile * positions
    length = jnp.clip(length_ref[...] - tile * positions, 0, positions)
    features = jnp.arange(width) < size
    real = ((jnp.arange(positions) < length)[:, None] & (jnp.arange(queries) < group)[None, :])[:, :, None] & features
    q = plgpu.load(q_ref, mask=real, other=0.0).reshape(positions * queries, width)
    at_query = start + jnp.arange(positions * queries) // queries
    end = jnp.where(length > 0, start + length, 0)

    def read(masked: bool, index: jax.Array, so_far: Softmax) -> Softmax:
        at = index * block + jnp.arange(block)
        pages, offsets = where_is(table_ref, row, index, block, page_size, end)
        where = pages, offsets, head, jnp.arange(width)[None, :]
        if not masked and width == size:
            return so_far.add(spec, q, k_ref[where], v_ref[where], None)
        there = (at < end)[:, None] & features[None, :]
        keys = plgpu.load(k_ref.at[where], mask=there, other=0.0)
        values = plgpu.load(v_ref.at[where], mask=there, other=0.0)
        seen = at[None, :] <= at_query[:, None]
        if spec.window is not None:
            seen &= at[None, :] > at_query[:, None] - spec.window
        return so_far.add(spec, q, keys, values, seen if masked else None)

    softmax = Softmax.begin(positions * queries, width)
    num_blocks = (end + block - 1) // block
    if spec.window is None:  # everything before the first query is seen by all
        first = jnp.minimum(start // block, num_blocks)
        softmax = jax.lax.fori_loop(0, first, partial(read, False), softmax)
    else:
        first = jnp.minimum(jnp.maximum(start - spec.window + 1, 0) // block, num_blocks)
    softmax = jax.lax.fori_loop(first, num_blocks, partial(read, True), softmax)
    out = jnp.where(real, softmax.result().reshape(positions, queries, width), 0.0)
    stored = (jnp.arange(queries) < group)[None, :, None] & features
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=stored)
