"""Attention of decodes alone over pages: one program for each sequence, key head and part of the context.

Reading keys and values takes all the time, so the parts are cut such that the whole device reads, however few sequences
there are.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.tiles import Softmax, array, exponent_of_one, least_dot, power_of_two, where_is
from quire.ops.pages import Pages, Tiles

WANTED_PROGRAMS = 1024  # enough to have every multiprocessor of a large GPU wait for memory several times over
MAX_PARTS = 32


class Tiling(NamedTuple):
    block: int  # positions read at a time
    num_warps: int
    num_stages: int  # blocks on their way at a time


# The fastest of a dozen on an H200, whether contexts are alike or not, whole or in parts.
TILING = Tiling(32, 2, 4)


def num_parts(rows: int, kv_heads: int) -> int:
    """Into how many parts each context is cut."""
    return min(MAX_PARTS, power_of_two(-(-WANTED_PROGRAMS // (rows * kv_heads))))


def decode_attention(
    spec: AttentionSpec,
    q: jax.Array,
    pages: Pages,
    page_table: jax.Array,
    tiles: Tiles,
    *,
    parts: int | None = None,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of q [n, k, g, h], one query of each tile; [n, k, g, h], zero for padding."""
    rows, heads, group, size = q.shape
    k_pages, v_pages = pages
    parts = parts or num_parts(rows, heads)
    block, num_warps, num_stages = tiling or TILING
    queries, width = least_dot(group), power_of_two(size)
    whole = [pl.BlockSpec(k_pages.shape, lambda *_: (0, 0, 0, 0))] * 2
    shapes = [array(q.shape, q.dtype)]
    out_specs = [pl.BlockSpec((None, None, queries, width), lambda head, row, part: (row, head, 0, 0))]
    if parts > 1:
        of_part = pl.BlockSpec((None, None, queries, None), lambda head, row, part: (row, head, 0, part))
        shapes = [
            array((rows, heads, group, parts, size), jnp.float32),
            *[array((rows, heads, group, parts), jnp.float32)] * 2,
        ]
        out_specs = [
            pl.BlockSpec((None, None, queries, None, width), lambda head, row, part: (row, head, 0, part, 0)),
            *[of_part] * 2,
        ]
    out: Any = pl.pallas_call(
        partial(_read_part, spec, group, size, k_pages.shape[1], parts, block),
        # The heads of a sequence run beside each other: their keys do.
        grid=(heads, rows, parts),
        in_specs=[
            pl.BlockSpec(page_table.shape, lambda *_: (0, 0)),
            *[pl.BlockSpec((None,), lambda head, row, part: (row,))] * 3,
            pl.BlockSpec((None, None, queries, width), lambda head, row, part: (row, head, 0, 0)),
            *whole,
        ],
        out_specs=out_specs,
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="decode_attention",
    )(page_table, tiles.slots, tiles.starts, tiles.lengths, q, k_pages, v_pages)
    if parts == 1:
        return out[0]  # type: ignore[no-any-return]
    return _combined(q.dtype, *out, interpret=interpret)


def _read_part(
    spec: AttentionSpec,
    group: int,
    size: int,
    page_size: int,
    parts: int,
    block: int,
    table_ref: Any,
    slot_ref: Any,
    start_ref: Any,
    length_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *out_refs: Any,
) -> None:
    head, part = pl.program_id(0), pl.program_id(2)
    slot = slot_ref[...]
    queries, width = q_ref.shape
    end = jnp.where(length_ref[...] > 0, start_ref[...] + 1, 0)
    first = 0 if spec.window is None else jnp.maximum(end - spec.window, 0) // block
    num_blocks = (end + block - 1) // block - first
    each = (num_blocks + parts - 1) // parts
    begin = first + part * each
    features = jnp.arange(width) < size
    real = (jnp.arange(queries) < group)[:, None] & features[None, :]
    q = plgpu.load(q_ref, mask=real, other=0.0)

    def read(index: jax.Array, so_far: Softmax) -> Softmax:
        at = index * block + jnp.arange(block)
        seen = at < end
        if spec.window is not None:
            seen &= at >= end - spec.window
        pages, offsets = where_is(table_ref, slot, index, block, page_size, end)
        there = seen[:, None] & features[None, :]
        where = pages, offsets, head, jnp.arange(width)[None, :]
        keys = plgpu.load(k_ref.at[where], mask=there, other=0.0)
        values = plgpu.load(v_ref.at[where], mask=there, other=0.0)
        return so_far.add(spec, q, keys, values, jnp.broadcast_to(seen[None, :], (queries, block)))

    last = jnp.minimum(begin + each, first + num_blocks)
    softmax = jax.lax.fori_loop(begin, last, read, Softmax.begin(queries, width))
    if parts == 1:
        plgpu.store(out_refs[0], softmax.result().astype(out_refs[0].dtype), mask=real)
    else:
        plgpu.store(out_refs[0], softmax.out, mask=real)
        plgpu.store(out_refs[1], softmax.highest * exponent_of_one(spec), mask=jnp.arange(queries) < group)
        plgpu.store(out_refs[2], softmax.total, mask=jnp.arange(queries) < group)


def _combined(dtype: Any, outs: jax.Array, highest: jax.Array, totals: jax.Array, *, interpret: bool) -> jax.Array:
    """The parts put together: each counts by the share of the softmax that lies in it."""
    rows, heads, group, parts, size = outs.shape
    of_query = pl.BlockSpec((None, None, None, parts), lambda row, head, query: (row, head, query, 0))
    width = power_of_two(size)
    out: jax.Array = pl.pallas_call(
        partial(_combine, size),
        grid=(rows, heads, group),
        in_specs=[
            pl.BlockSpec((None, None, None, parts, width), lambda row, head, query: (row, head, query, 0, 0)),
            of_query,
            of_query,
        ],
        out_specs=pl.BlockSpec((None, None, None, width), lambda row, head, query: (row, head, query, 0)),
        out_shape=array((rows, heads, group, size), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="combine_parts",
    )(outs, highest, totals)
    return out


def _combine(size: int, outs_ref: Any, highest_ref: Any, totals_ref: Any, out_ref: Any) -> None:
    features = jnp.arange(outs_ref.shape[1]) < size
    highest = highest_ref[...]
    share = jnp.exp2(highest - highest.max(axis=0))
    total = (share * totals_ref[...]).sum(axis=0)
    out = (share[:, None] * plgpu.load(outs_ref, mask=features[None, :], other=0.0)).sum(axis=0)
    plgpu.store(out_ref, (out / jnp.maximum(total, 1e-30)).astype(out_ref.dtype), mask=features)
