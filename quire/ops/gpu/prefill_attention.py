"""Attention of the tiles that prefills are cut into, over pages.

One program computes some positions of a tile with all the queries of one key head, so that what it reads serves as many
rows of a matrix product as fit the registers.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.tiles import Softmax, array, power_of_two, where_is, whole
from quire.ops.pages import TILE, Pages, Tiles

BLOCK = 64  # positions read at a time
MAX_ROWS = 128  # of a program
# Products of float32, which tensor cores do not do, are written out: larger ones take minutes to compile.
EXACT_BLOCK, MAX_EXACT_ROWS = 32, 32


def prefill_attention(
    spec: AttentionSpec,
    q: jax.Array,
    pages: Pages,
    page_table: jax.Array,
    tiles: Tiles,
    out: jax.Array | None = None,
    *,
    block: int | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
    interpret: bool = False,
) -> jax.Array:
    """Attention of q [t, k, g, h]; [t, k, g, h], written over `out`. Tokens of no tile stay as they are there."""
    _, heads, group, _ = q.shape
    queries = power_of_two(group)
    is_exact = q.dtype == jnp.float32
    block = block or (EXACT_BLOCK if is_exact else BLOCK)
    positions = min(TILE, max(1, (MAX_EXACT_ROWS if is_exact else MAX_ROWS) // queries))  # of a program
    parts = TILE // positions
    of_tile = pl.BlockSpec((None,), lambda index, head: (index // parts,))
    operands = [page_table, tiles.slots, tiles.starts, tiles.lengths, tiles.offsets, q, *pages]
    operands += [] if out is None else [out]
    result: jax.Array = pl.pallas_call(
        partial(_read, spec, positions, parts, block),
        grid=(len(tiles) * parts, heads),
        in_specs=[whole(page_table), *[of_tile] * 4, *map(whole, operands[5:])],
        out_specs=whole(q),
        out_shape=array(q.shape, q.dtype),
        input_output_aliases={} if out is None else {len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="prefill_attention",
    )(*operands)
    return result


def _read(
    spec: AttentionSpec,
    positions: int,
    parts: int,
    block: int,
    table_ref: Any,
    slot_ref: Any,
    start_ref: Any,
    length_ref: Any,
    offset_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *out_refs: Any,
) -> None:
    out_ref = out_refs[-1]
    part, head = pl.program_id(0) % parts, pl.program_id(1)
    _, _, group, size = q_ref.shape
    page_size, queries, width = k_ref.shape[1], power_of_two(group), power_of_two(size)
    slot = slot_ref[...]
    start = start_ref[...] + part * positions
    length = jnp.clip(length_ref[...] - part * positions, 0, positions)
    features = jnp.arange(width) < size
    real = ((jnp.arange(positions) < length)[:, None] & (jnp.arange(queries) < group)[None, :])[:, :, None] & features
    token = offset_ref[...] + part * positions + jnp.arange(positions)
    at_token = token[:, None, None], head, jnp.arange(queries)[None, :, None], jnp.arange(width)[None, None, :]
    q = plgpu.load(q_ref.at[at_token], mask=real, other=0.0).reshape(positions * queries, width)
    at_query = start + jnp.arange(positions * queries) // queries
    end = jnp.where(length > 0, start + length, 0)
    begin = 0 if spec.window is None else jnp.maximum(start - spec.window + 1, 0)

    def read(masked: bool, index: jax.Array, so_far: Softmax) -> Softmax:
        at = index * block + jnp.arange(block)
        pages, offsets = where_is(table_ref, slot, index, block, page_size, end)
        where = pages, offsets, head, jnp.arange(width)[None, :]
        if not masked and width == size:
            return so_far.add(spec, q, k_ref[where], v_ref[where], None)
        # Positions behind the window of every query may hold anything: they are not loaded.
        there = ((at >= begin) & (at < end))[:, None] & features[None, :]
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
        first = jnp.minimum(begin // block, num_blocks)
    softmax = jax.lax.fori_loop(first, num_blocks, partial(read, True), softmax)
    out = softmax.result().reshape(positions, queries, width)
    plgpu.store(out_ref.at[at_token], out.astype(out_ref.dtype), mask=real)
