"""Attention of prefills over pages of eight bits, on Hopper GPUs.

An item is some tokens of a sequence with all queries of a head. Two groups of threads compute it, each with half of the
tokens. A third group widens the codes of a block of positions for both, and a warp of a fourth prefetches codes. A
program takes items from a list in turn, and prefetches those of the next while it computes.

Written in Pallas for Mosaic: in Triton all groups of threads run the same code.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from quire.ops.gpu.hopper.code_fragments import OF_CODES, OF_HALVES, SCALES_OF_PAGE, by_warp
from quire.ops.gpu.hopper.item_turns import ItemTurns, fetch_blocks, num_programs
from quire.ops.gpu.hopper.prefill_fragments import (
    largest_power,
    place_rows,
    row_tokens,
    store_tokens,
    units_of_rows,
    widen_rows,
)
from quire.ops.gpu.hopper.prefill_items import BLOCK, FEATURES, GROUPS, WIDE, prefill_items, tokens_of_group
from quire.ops.gpu.tiles import LOG2_E, array
from quire.ops.pages import CodedPages, PagedContext

AHEAD = 3  # blocks of keys or values that have room at once, as codes, and widened
WIDENS, FETCHES = GROUPS, GROUPS + 1  # the groups that do
# Of a thread that computes, widens and fetches: those of all four groups are what a multiprocessor has.
COMPUTING_REGISTERS, WIDENING_REGISTERS, FETCHING_REGISTERS = 200, 72, 40
LEAST_UNIT = 2.0**-100  # of scores: a smaller one changes nothing, and 0 times a masked score would be NaN


def coded_prefills(q: jax.Array, context: PagedContext) -> jax.Array:
    """Attention of q [t, k, g, h]; [t, k, g, h]. Tokens of no tile may be anything."""
    pages = context.pages
    assert isinstance(pages, CodedPages)
    (_, heads, queries, _), page_size = q.shape, pages.k.shape[1]
    tokens = tokens_of_group(queries)
    items = prefill_items(context.tiles, GROUPS * tokens)
    programs = num_programs()
    sizes = _Sizes(heads, queries, tokens, context.spec.scale * LOG2_E, page_size, pages.k.dtype.name, programs)
    run = plgpu.kernel(
        partial(_kernel, sizes),
        out_type=array(q.shape, q.dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=GROUPS + 2,
        thread_name="group",
        kernel_name="coded_prefills",
        scratch_types=sizes.scratch(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True, unsafe_no_auto_barriers=True
        ),
    )
    out: jax.Array = run(context.page_table, items.fields, items.length, q, *pages)
    return out


class _Sizes(NamedTuple):
    heads: int
    queries: int  # of a head
    tokens: int  # of a group
    unit: float  # the power of two that a score of one stands for
    page_size: int
    code_dtype: str
    programs: int

    @property
    def pages_of_block(self) -> int:
        return BLOCK // self.page_size

    def scratch(self) -> list[Any]:
        """The arguments of `_Shared`."""
        return [
            plgpu.SMEM((GROUPS, self.tokens, self.queries, FEATURES), jnp.bfloat16),
            plgpu.SMEM((GROUPS, WIDE, FEATURES), jnp.float16, transforms=OF_HALVES),
            plgpu.SMEM((GROUPS, WIDE), jnp.float32),
            plgpu.SMEM((AHEAD, BLOCK, FEATURES), jnp.float16, transforms=OF_HALVES),
            plgpu.SMEM((AHEAD, 1), jnp.float32),
            plgpu.SMEM((AHEAD, BLOCK, FEATURES), jnp.dtype(self.code_dtype), transforms=OF_CODES),
            plgpu.SMEM((AHEAD, self.pages_of_block, SCALES_OF_PAGE), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=GROUPS),
            plgpu.Barrier(num_arrivals=GROUPS),
            plgpu.Barrier(num_arrivals=2 * self.pages_of_block, num_barriers=AHEAD),
            plgpu.Barrier(num_barriers=AHEAD),
            plgpu.Barrier(num_barriers=AHEAD),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=AHEAD),
        ]


class _Shared(NamedTuple):
    """The shared memory of a program, and its barriers. Blocks are of keys and of values by turns."""

    queries: Any  # of groups, of the next item
    rows: Any  # of groups: queries as they are multiplied
    row_units: Any  # of these queries
    wide: Any  # blocks
    units: Any  # of these blocks
    codes: Any
    scales: Any
    queries_there: Any
    queries_free: Any
    codes_there: Any
    codes_free: Any
    wide_there: Any
    wide_free: Any


class _Item(NamedTuple):
    """An entry of the list, for one head."""

    slot: Any
    start: Any  # position
    token: Any
    length: Any  # tokens
    head: Any

    @property
    def end(self) -> Any:
        return self.start + self.length

    @property
    def num_blocks(self) -> Any:
        return lax.div(self.end + BLOCK - 1, BLOCK)


def _kernel(sizes: _Sizes, table_ref: Any, items_ref: Any, count_ref: Any, q_ref: Any, *refs: Any) -> None:
    page_refs, out_ref, shared = refs[:4], refs[4], _Shared(*refs[5:])
    group = lax.axis_index("group")
    work = ItemTurns(
        _Item, lax.axis_index("program"), items_ref, count_ref[0] * sizes.heads, sizes.heads, sizes.programs
    )

    @pl.when(group == FETCHES)
    def _() -> None:
        plgpu.set_max_registers(FETCHING_REGISTERS, action="decrease")
        by_warp(1, lambda _: _fetch_all(sizes, work, table_ref, q_ref, page_refs, shared))

    pl.when(group == WIDENS)(lambda: _widen_all(sizes, work, shared))
    pl.when(group < GROUPS)(lambda: _compute_all(sizes, work, group, out_ref, shared))


def _place(block: Any, which: int) -> Any:
    """Of keys, 0, or values, 1."""
    return lax.rem(2 * block + which, AHEAD)


def _fetch_all(
    sizes: _Sizes, work: ItemTurns[_Item], table_ref: Any, q_ref: Any, page_refs: Any, shared: _Shared
) -> None:
    """The part of the warp that prefetches codes and queries."""

    def pages_of(item: _Item, block: Any) -> tuple[Any, ...]:
        end = lax.div(item.end - 1, sizes.page_size)
        indices = (block * sizes.pages_of_block + index for index in range(sizes.pages_of_block))
        return tuple(table_ref[item.slot, jnp.minimum(index, end)] for index in indices)

    def begin(turn: Any, item: _Item) -> None:
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(shared.queries_free))
        for group in range(GROUPS):
            tokens = pl.ds(item.token + group * sizes.tokens, sizes.tokens)
            plgpu.copy_gmem_to_smem(q_ref.at[tokens, item.head], shared.queries.at[group], shared.queries_there)

    def fetch(fetched: Any, pages: tuple[Any, ...], item: _Item) -> None:
        for which in range(2):
            place = _place(fetched, which)
            is_there = shared.codes_there.at[place]
            pl.when(2 * fetched + which >= AHEAD)(partial(plgpu.barrier_wait, shared.codes_free.at[place]))
            for number, page in enumerate(pages):
                into = shared.codes.at[place, pl.ds(number * sizes.page_size, sizes.page_size)]
                plgpu.copy_gmem_to_smem(page_refs[which].at[page, :, item.head], into, is_there)
                of_scales = shared.scales.at[place, number, pl.ds(0, sizes.page_size)]
                plgpu.copy_gmem_to_smem(page_refs[2 + which].at[page, item.head], of_scales, is_there)

    fetch_blocks(work, pages_of, begin, fetch)


def _widen_all(sizes: _Sizes, work: ItemTurns[_Item], shared: _Shared) -> None:
    """The part of the group that widens codes."""
    plgpu.set_max_registers(WIDENING_REGISTERS, action="decrease")
    widen, find_power = widen_rows(sizes.code_dtype, sizes.page_size), largest_power(sizes.page_size)

    def widen_item(turn: Any, state: tuple[Any, _Item]) -> tuple[Any, _Item]:
        widened, item = state
        next_item = work.item(turn + 1)

        def widen_block(block: Any, power_of_values: Any) -> Any:
            number, left = widened + block, item.end - block * BLOCK
            power = jnp.int32(0)
            for which in range(2):
                place = _place(number, which)
                plgpu.barrier_wait(shared.codes_there.at[place])
                pl.when(2 * number + which >= AHEAD)(partial(plgpu.barrier_wait, shared.wide_free.at[place]))
                codes, scales = shared.codes.at[place], shared.scales.at[place]
                power = find_power(scales, left, power_of_values if which else power)
                widen(codes, scales, left, power, shared.wide.at[place], shared.units.at[place])
                plgpu.commit_smem()  # type: ignore[no-untyped-call]
                plgpu.barrier_arrive(shared.wide_there.at[place])
                plgpu.barrier_arrive(shared.codes_free.at[place])
            return power

        lax.fori_loop(0, item.num_blocks, widen_block, jnp.int32(0))
        return widened + item.num_blocks, next_item

    lax.fori_loop(0, work.turns, widen_item, (jnp.int32(0), work.item(jnp.int32(0))))


class _Softmax(NamedTuple):
    """A softmax under way, of the rows of a group. Sums are in parts of the largest unit of values so far."""

    highest: Any
    total: Any
    sums: Any
    unit: Any

    @classmethod
    def begin(cls) -> "_Softmax":
        by_row = plgpu.Layout.WGMMA.reduce(1)
        highest = plgpu.layout_cast(jnp.full((WIDE,), -jnp.inf, jnp.float32), by_row)
        total = plgpu.layout_cast(jnp.zeros((WIDE,), jnp.float32), by_row)
        sums = plgpu.layout_cast(jnp.zeros((WIDE, FEATURES), jnp.float32), plgpu.Layout.WGMMA)
        return cls(highest, total, sums, jnp.float32(0.0))


def _by_rows(x: Any, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(x, shape, (0,))


def _compute_all(sizes: _Sizes, work: ItemTurns[_Item], group: Any, out_ref: Any, shared: _Shared) -> None:
    """The part of a group that computes."""
    plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
    place, of_rows = place_rows(sizes.unit), row_tokens(sizes.queries)
    store = store_tokens(sizes.queries, sizes.heads * sizes.queries * FEATURES)

    def compute(turn: Any, state: tuple[Any, _Item]) -> tuple[Any, _Item]:
        computed, item = state
        next_item = work.item(turn + 1)
        plgpu.barrier_wait(shared.queries_there)
        rows = shared.rows.at[group]
        place(shared.queries.at[group], rows, shared.row_units.at[group])
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        plgpu.barrier_arrive(shared.queries_free)
        units = units_of_rows(shared.row_units.at[group])
        first = group * sizes.tokens  # token of the item

        def add(is_masked: bool, block: Any, so_far: _Softmax) -> _Softmax:
            last = of_rows() + (item.start + first - block * BLOCK) if is_masked else None
            return _add_block(shared, rows, units, computed + block, last, so_far)

        masked_from = lax.div(item.start, BLOCK)
        softmax = lax.fori_loop(0, masked_from, partial(add, False), _Softmax.begin())
        softmax = lax.fori_loop(masked_from, item.num_blocks, partial(add, True), softmax)
        result = softmax.sums * _by_rows(softmax.unit / softmax.total, softmax.sums.shape)
        left = jnp.minimum(item.length - first, sizes.tokens)
        store(result, out_ref.at[item.token + first, item.head], left)
        return computed + item.num_blocks, next_item

    lax.fori_loop(0, work.turns, compute, (jnp.int32(0), work.item(jnp.int32(0))))


def _add_block(shared: _Shared, rows: Any, row_units: Any, number: Any, last: Any | None, so_far: _Softmax) -> _Softmax:
    """With a block. `last` [WIDE]: the last position in it that a row sees; None: all rows see all of it."""
    shape = WIDE, BLOCK
    keys, values = _place(number, 0), _place(number, 1)
    plgpu.barrier_wait(shared.wide_there.at[keys])

    def multiply_keys(sums: Any) -> Any:
        plgpu.wgmma(sums, rows, shared.wide.at[keys].transpose((1, 0)))
        return sums[...]

    units = jnp.maximum(row_units * shared.units[keys, 0], LEAST_UNIT)
    scores = pl.run_scoped(multiply_keys, plgpu.WGMMAAccumulatorRef(shape))
    plgpu.barrier_arrive(shared.wide_free.at[keys])
    if last is not None:
        position = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        scores = jnp.where(position <= _by_rows(last, shape), scores, -jnp.inf)
    highest = jnp.maximum(so_far.highest, scores.max(axis=1) * units)
    shrink = jnp.exp2(so_far.highest - highest)
    weights = jnp.exp2(scores * _by_rows(units, shape) - _by_rows(highest, shape))
    total = so_far.total * shrink + weights.sum(axis=1)
    narrow = weights.astype(jnp.float16)
    total, highest, narrow = lax.optimization_barrier((total, highest, narrow))  # type: ignore[no-untyped-call]
    plgpu.barrier_wait(shared.wide_there.at[values])
    unit = shared.units[values, 0]
    sums = so_far.sums * _by_rows(shrink * (so_far.unit / unit), so_far.sums.shape)

    def multiply_values(sums_ref: Any) -> None:
        plgpu.wgmma(sums_ref, narrow, shared.wide.at[values])

    accumulator = plgpu.WGMMAAccumulatorRef.init(sums)  # type: ignore[no-untyped-call]
    sums = pl.run_state(multiply_values)(accumulator)
    plgpu.barrier_arrive(shared.wide_free.at[values])
    return _Softmax(highest, total, sums, unit)
