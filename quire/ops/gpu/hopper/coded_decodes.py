"""Attention of decodes over pages of eight bits at the speed of reading them, on Hopper GPUs.

A program has WORKERS groups of threads that compute, each with blocks of its own, and one more group, of which one warp
per worker prefetches its blocks. Work is a list of parts of contexts, as for `decode_attention`: workers take from it
in turn, the longest first. Queries are the narrow side of the device's products, and codes are widened in registers.

Written in Pallas for Mosaic: Triton moves the codes of values through shared memory, and prefetches less.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.coded_softmax import ROOM
from quire.ops.gpu.hopper.code_fragments import (
    BY_COLUMN,
    BY_PRODUCT,
    OF_CODES,
    OF_HALVES,
    SCALES_OF_PAGE,
    by_warp,
    largest_scale,
    over_rows,
    place_queries,
    scales_by_row,
    store_columns,
    store_rows,
    store_weights,
    widened_keys,
    widened_values,
)
from quire.ops.gpu.hopper.decode_items import BLOCK, COLUMNS, FEATURES, items_of
from quire.ops.gpu.hopper.item_turns import ItemTurns, fetch_blocks, num_programs
from quire.ops.gpu.parts import Parts
from quire.ops.gpu.tiles import LOG2_E, MASKED, array
from quire.ops.pages import CodedPages, PagedContext

WORKERS, AHEAD = 2, 3  # groups that compute, and blocks that each of them has room for


def coded_decodes(q: jax.Array, context: PagedContext, part: int, max_parts: int) -> tuple[jax.Array, jax.Array, Parts]:
    """Results [t, k, g, h] of the contexts that are one part; how many parts each has; and those of the others."""
    pages, tiles = context.pages, context.tiles
    assert isinstance(pages, CodedPages)
    items = items_of(tiles, part, max_parts)
    (_, heads, queries, _), page_size = q.shape, pages.k.shape[1]
    programs = num_programs()
    sizes = _Sizes(heads, queries, context.spec.scale * LOG2_E, page_size, pages.k.dtype.name, q.dtype, programs)
    run = plgpu.kernel(
        partial(_kernel, sizes),
        out_type=[array(q.shape, q.dtype), *Parts.shapes(max_parts, q[: len(tiles)])],
        grid=(programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="group",
        kernel_name="coded_decodes",
        scratch_types=sizes.scratch(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
        ),
    )
    out, *parts = run(context.page_table, items.fields, items.length, q, *pages)
    return out, items.parts, Parts(*parts)


class _Sizes(NamedTuple):
    heads: int
    queries: int  # of a head
    unit: float  # the power of two that a score of one stands for
    page_size: int
    code_dtype: str
    dtype: Any
    programs: int

    @property
    def pages_of_block(self) -> int:
        return BLOCK // self.page_size

    def scratch(self) -> list[Any]:
        """The arguments of `_Shared`."""
        blocks, of_items = WORKERS * AHEAD, WORKERS * (AHEAD + 1)
        codes = plgpu.SMEM((blocks, BLOCK, FEATURES), jnp.dtype(self.code_dtype), transforms=OF_CODES)
        scales = plgpu.SMEM((blocks, self.pages_of_block, SCALES_OF_PAGE), jnp.bfloat16)
        return [
            plgpu.SMEM((of_items, self.queries, FEATURES), self.dtype),
            plgpu.SMEM((WORKERS, COLUMNS, FEATURES), jnp.float16, transforms=OF_HALVES),
            plgpu.SMEM((WORKERS, COLUMNS), jnp.float32),
            *(codes, codes, scales, scales),
            plgpu.SMEM((WORKERS, COLUMNS, BLOCK), jnp.float16, transforms=OF_HALVES),
            plgpu.SMEM((WORKERS, 4, COLUMNS), jnp.float32),
            plgpu.Barrier(num_arrivals=4 * self.pages_of_block, num_barriers=blocks),
            plgpu.Barrier(num_barriers=blocks),
            plgpu.Barrier(num_barriers=of_items),
        ]


class _Shared(NamedTuple):
    """The shared memory of a program, and its barriers. Queries have a place more than blocks: while a worker computes
    an item, each of its prefetched blocks may belong to another."""

    queries: Any  # of items, as they are
    wide_queries: Any  # of workers, as they are multiplied
    units: Any  # of these queries
    codes: tuple[Any, Any]
    scales: tuple[Any, Any]
    weights: Any
    columns: Any
    are_there: Any  # blocks
    are_free: Any
    have_queries: Any

    @classmethod
    def of(cls, refs: tuple[Any, ...]) -> "_Shared":
        queries, wide, units, k, v, k_scales, v_scales, *others = refs
        return cls(queries, wide, units, (k, v), (k_scales, v_scales), *others)


class _Item(NamedTuple):
    """An entry of the list, for one head."""

    token: Any
    slot: Any
    first: Any
    last: Any
    part: Any
    head: Any

    @property
    def num_blocks(self) -> Any:
        return lax.div(self.last - self.first + BLOCK - 1, BLOCK)


def _kernel(sizes: _Sizes, table_ref: Any, items_ref: Any, count_ref: Any, q_ref: Any, *refs: Any) -> None:
    page_refs, (out_ref, *parts), shared = refs[:4], refs[4:8], _Shared.of(refs[8:])
    program, group = lax.axis_index("program"), lax.axis_index("group")
    count = count_ref[0] * sizes.heads

    def work(index: Any) -> ItemTurns[_Item]:
        return ItemTurns(_Item, program * WORKERS + index, items_ref, count, sizes.heads, sizes.programs * WORKERS)

    @pl.when(group < WORKERS)
    def _() -> None:
        _compute_all(sizes, work(group), group, out_ref, Parts(*parts), shared)

    @pl.when(group == WORKERS)
    def _() -> None:
        by_warp(WORKERS, lambda worker: _fetch_all(sizes, work(worker), worker, table_ref, q_ref, page_refs, shared))


def _fetch_all(
    sizes: _Sizes,
    work: ItemTurns[_Item],
    worker: Any,
    table_ref: Any,
    q_ref: Any,
    page_refs: Any,
    shared: _Shared,
) -> None:
    """The part of the warp that prefetches the blocks of a worker."""

    def pages_of(item: _Item, block: Any) -> tuple[Any, ...]:
        first, end = lax.div(item.first, sizes.page_size), lax.div(item.last - 1, sizes.page_size)
        indices = (first + block * sizes.pages_of_block + index for index in range(sizes.pages_of_block))
        return tuple(table_ref[item.slot, jnp.minimum(index, end)] for index in indices)

    def begin(turn: Any, item: _Item) -> None:
        at = worker * (AHEAD + 1) + lax.rem(turn, AHEAD + 1)
        plgpu.copy_gmem_to_smem(q_ref.at[item.token, item.head], shared.queries.at[at], shared.have_queries.at[at])

    def fetch(fetched: Any, pages: tuple[Any, ...], item: _Item) -> None:
        place = worker * AHEAD + lax.rem(fetched, AHEAD)
        pl.when(fetched >= AHEAD)(lambda: plgpu.barrier_wait(shared.are_free.at[place]))
        is_there = shared.are_there.at[place]
        for number, page in enumerate(pages):
            own = pl.ds(number * sizes.page_size, sizes.page_size)
            for ref, codes in zip(page_refs[:2], shared.codes, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[page, :, item.head], codes.at[place, own], is_there)
            for ref, scales in zip(page_refs[2:], shared.scales, strict=True):
                into = scales.at[place, number, pl.ds(0, sizes.page_size)]
                plgpu.copy_gmem_to_smem(ref.at[page, item.head], into, is_there)

    fetch_blocks(work, pages_of, begin, fetch)


class _Softmax(NamedTuple):
    """A softmax under way, as `CodedSoftmax`; totals are those of each row of a block."""

    highest: Any
    totals: Any
    largest: Any
    sums: Any

    @classmethod
    def begin(cls) -> "_Softmax":
        highest = plgpu.layout_cast(jnp.full((COLUMNS,), MASKED, jnp.float32), BY_COLUMN)
        totals = plgpu.layout_cast(jnp.zeros((BLOCK, COLUMNS), jnp.float32), BY_PRODUCT)
        sums = plgpu.layout_cast(jnp.zeros((FEATURES, COLUMNS), jnp.float32), BY_PRODUCT)
        return cls(highest, totals, jnp.float32(0.0), sums)


def _by_rows(x: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(x, shape, (0,))


def _by_columns(x: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(x, shape, (1,))


def _compute_all(
    sizes: _Sizes, work: ItemTurns[_Item], group: Any, out_ref: Any, parts: Parts, shared: _Shared
) -> None:
    """The part of a group that computes."""
    columns, queries = shared.columns.at[group], sizes.queries
    place, sum_rows = place_queries(queries, sizes.unit), over_rows("add.f32")
    store_part, store_column = store_rows(queries, jnp.float32), store_columns(queries)

    def compute(turn: Any, state: tuple[Any, _Item]) -> tuple[Any, _Item]:
        computed, item = state
        next_item = work.item(turn + 1)
        at = group * (AHEAD + 1) + lax.rem(turn, AHEAD + 1)
        plgpu.barrier_wait(shared.have_queries.at[at])
        place(shared.queries.at[at], shared.wide_queries.at[group], shared.units.at[group])
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        units = plgpu.load(shared.units.at[group], layout=BY_COLUMN, optimized=False)  # type: ignore[call-arg]
        add = partial(_add_block, sizes, group, shared, units)
        softmax: _Softmax = lax.fori_loop(
            0,
            item.num_blocks,
            lambda block, so_far: add(lax.rem(computed + block, AHEAD), item.last - item.first - block * BLOCK, so_far),
            _Softmax.begin(),
        )
        totals = sum_rows(softmax.totals, columns)
        sums = softmax.sums * (softmax.largest * (1.0 / ROOM))

        @pl.when(item.part < 0)
        def _() -> None:
            result = sums / _by_columns(totals, sums.shape)
            store_rows(queries, sizes.dtype)(result, out_ref.at[item.token, item.head])

        @pl.when(item.part >= 0)
        def _() -> None:
            where = item.part, item.token, item.head
            store_part(sums, parts.outs.at[where])
            store_column(softmax.highest, parts.highest.at[where])
            store_column(totals, parts.totals.at[where])

        return computed + item.num_blocks, next_item

    lax.fori_loop(0, work.turns, compute, (jnp.int32(0), work.item(jnp.int32(0))))


def _add_block(
    sizes: _Sizes, group: Any, shared: _Shared, units: Any, place: Any, left: Any, so_far: _Softmax
) -> _Softmax:
    """With the block at a place of a group, of whose positions the first `left` are seen."""
    at = group * AHEAD + place
    codes, scales = ([ref.at[at] for ref in refs] for refs in (shared.codes, shared.scales))
    load_scales = scales_by_row(sizes.page_size)
    plgpu.barrier_wait(shared.are_there.at[at])

    def multiply_keys(sums: Any) -> tuple[Any, Any]:
        plgpu.wgmma(sums, widened_keys(sizes.code_dtype)(codes[0]), shared.wide_queries.at[group].transpose((1, 0)))
        values = widened_values(sizes.code_dtype)(codes[1], left)  # while the device multiplies
        return values, sums[...]

    key_scales, value_scales = map(load_scales, scales)
    largest = jnp.maximum(so_far.largest, largest_scale(sizes.page_size)(scales[1], left))
    values, scores = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef((BLOCK, COLUMNS)))
    plgpu.barrier_arrive(shared.are_free.at[at])
    shape = scores.shape
    seen = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=BY_PRODUCT) < left
    scores = jnp.where(seen, scores * _by_rows(key_scales, shape) * _by_columns(units, shape), MASKED)
    highest = jnp.maximum(so_far.highest, over_rows("max.NaN.f32")(scores, shared.columns.at[group]))
    weights = jnp.exp2(scores - _by_columns(highest, shape))
    shrink, inverse = jnp.exp2(so_far.highest - highest), 1.0 / largest
    totals = so_far.totals * _by_columns(shrink, shape) + weights
    scaled = jnp.where(seen, weights * _by_rows(value_scales * (inverse * ROOM), shape), 0.0)
    store_weights(scaled.astype(jnp.float16), shared.weights.at[group])
    plgpu.commit_smem()  # type: ignore[no-untyped-call]

    def multiply_values(sums: Any) -> Any:
        plgpu.wgmma(sums, values, shared.weights.at[group].transpose((1, 0)))
        return sums[...]

    added = pl.run_scoped(multiply_values, plgpu.WGMMAAccumulatorRef((FEATURES, COLUMNS)))
    sums = so_far.sums * _by_columns(shrink * (so_far.largest * inverse), added.shape) + added
    return _Softmax(highest, totals, largest, sums)
