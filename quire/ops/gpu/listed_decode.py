"""Attention of decodes beside prefills: a list of work that a fixed number of programs share.

A step with prefills has room for any number of decodes, so a program for each of them would mostly find nothing to do.
Contexts are cut by position instead, into parts of PART positions or of a multiple of that, and programs take parts
from a list that is as long as the contexts need. Each row's parts depend on its own length alone.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.decode_attention import TILING, Tiling
from quire.ops.gpu.tiles import Softmax, array, exponent_of_one, least_dot, power_of_two, where_is, whole
from quire.ops.pages import Pages, Tiles

PART = 256
MAX_PARTS = 16  # of one context: longer parts follow from it
NUM_PROGRAMS = 4224  # 32 for each multiprocessor of a large GPU; a few run at a time, and the fastest take the next


def listed_decode(
    spec: AttentionSpec,
    q: jax.Array,
    pages: Pages,
    page_table: jax.Array,
    tiles: Tiles,
    *,
    part: int = PART,
    tiling: Tiling = TILING,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the first tokens of q [t, k, g, h], one of each tile; [t, k, g, h], of which the others are not
    written."""
    _, heads, group, size = q.shape
    room = power_of_two(len(tiles))
    ends = jnp.pad(jnp.where(tiles.lengths > 0, tiles.starts + 1, 0), (0, room - len(tiles)))
    begins = jnp.zeros_like(ends) if spec.window is None else jnp.maximum(ends - spec.window, 0)
    each = part * -(-ends // (part * MAX_PARTS))  # positions of a part
    first = begins // jnp.maximum(each, 1)
    bounds = jnp.cumsum(-(-ends // jnp.maximum(each, 1)) - first)  # of each row's parts in the list
    slots = jnp.pad(tiles.slots, (0, room - len(tiles)))
    most = len(tiles) * MAX_PARTS
    rows = [slots, ends, each, first, bounds]
    operands = [page_table, *rows, q, *pages]
    shapes = [array((most, heads, group, size), jnp.float32), *[array((most, heads, group), jnp.float32)] * 2]
    parts: Any = pl.pallas_call(
        partial(_read_parts, spec, tiling.block),
        grid=(heads, max(1, min(most, NUM_PROGRAMS // heads))),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="listed_decode",
    )(*operands)
    out: jax.Array = pl.pallas_call(
        _combine,
        grid=(len(tiles), heads),
        in_specs=[whole(operand) for operand in (bounds, *parts)],
        out_specs=whole(q),
        out_shape=array(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="combine_listed",
    )(bounds, *parts)
    return out


def _read_parts(
    spec: AttentionSpec,
    block: int,
    table_ref: Any,
    slots_ref: Any,
    ends_ref: Any,
    each_ref: Any,
    first_ref: Any,
    bounds_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    highest_ref: Any,
    total_ref: Any,
) -> None:
    head, program, num_programs = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    _, _, group, size = q_ref.shape
    queries, width = least_dot(group), power_of_two(size)
    is_query, is_feature = jnp.arange(queries) < group, jnp.arange(width) < size
    real = is_query[:, None] & is_feature[None, :]
    bounds = bounds_ref[...]

    def compute(turn: jax.Array, nothing: jax.Array) -> jax.Array:
        number = program + turn * num_programs
        row = (bounds <= number).astype(jnp.int32).sum()
        before = jnp.where(bounds <= number, bounds, 0).max()
        end, each = ends_ref[row], each_ref[row]
        begin = (first_ref[row] + number - before) * each
        last = jnp.minimum(begin + each, end)
        at_query = row, head, jnp.arange(queries)[:, None], jnp.arange(width)[None, :]
        q = plgpu.load(q_ref.at[at_query], mask=real, other=0.0)
        slot = slots_ref[row]

        def read(index: jax.Array, so_far: Softmax) -> Softmax:
            at = index * block + jnp.arange(block)
            seen = at < last
            if spec.window is not None:
                seen &= at >= end - spec.window
            pages, offsets = where_is(table_ref, slot, index, block, k_ref.shape[1], last)
            where = pages, offsets, head, jnp.arange(width)[None, :]
            there = seen[:, None] & is_feature[None, :]
            keys = plgpu.load(k_ref.at[where], mask=there, other=0.0)
            values = plgpu.load(v_ref.at[where], mask=there, other=0.0)
            return so_far.add(spec, q, keys, values, jnp.broadcast_to(seen[None, :], (queries, block)))

        first = begin if spec.window is None else jnp.maximum(begin, end - spec.window)
        blocks = first // block, (last + block - 1) // block
        softmax = jax.lax.fori_loop(*blocks, read, Softmax.begin(queries, width))
        at_part = number, head, jnp.arange(queries)
        plgpu.store(out_ref.at[number, head, at_query[2], at_query[3]], softmax.out, mask=real)
        plgpu.store(highest_ref.at[at_part], softmax.highest * exponent_of_one(spec), mask=is_query)
        plgpu.store(total_ref.at[at_part], softmax.total, mask=is_query)
        return nothing

    count = (bounds.max() - program + num_programs - 1) // num_programs
    jax.lax.fori_loop(0, count, compute, jnp.int32(0))


def _combine(bounds_ref: Any, outs_ref: Any, highest_ref: Any, totals_ref: Any, out_ref: Any) -> None:
    """The parts of one row and key head put together: each counts by its share of the softmax."""
    row, head = pl.program_id(0), pl.program_id(1)
    _, _, group, size = out_ref.shape
    queries, width = power_of_two(group), power_of_two(size)
    query, feature = jnp.arange(queries), jnp.arange(width)
    is_query = query < group
    real = is_query[:, None] & (feature < size)[None, :]
    end = bounds_ref[row]
    before = plgpu.load(bounds_ref.at[jnp.maximum(row - 1, 0)], mask=row > 0, other=0)

    def add(number: jax.Array, so_far: Softmax) -> Softmax:
        highest = plgpu.load(highest_ref.at[number, head, query], mask=is_query, other=0.0)
        total = plgpu.load(totals_ref.at[number, head, query], mask=is_query, other=0.0)
        out = plgpu.load(outs_ref.at[number, head, query[:, None], feature[None, :]], mask=real, other=0.0)
        most = jnp.maximum(so_far.highest, highest)
        old, new = jnp.exp2(so_far.highest - most), jnp.exp2(highest - most)
        return Softmax(most, so_far.total * old + total * new, so_far.out * old[:, None] + out * new[:, None])

    softmax = jax.lax.fori_loop(before, end, add, Softmax.begin(queries, width))
    where = row, head, query[:, None], feature[None, :]
    plgpu.store(out_ref.at[where], softmax.result().astype(out_ref.dtype), mask=real & (end > before))
