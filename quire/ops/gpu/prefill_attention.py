"""Attention of the tiles that prefills are cut into, over pages.

One program computes some positions of a tile with all the queries of one key head, so that what it reads serves as many
rows of a matrix product as fit the registers. Steps of few tokens have few programs, and a long context would take each
of them long: there contexts are cut into parts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.parts import Parts, combine_parts
from quire.ops.gpu.tiles import Block, Softmax, array, load_sinks, power_of_two, where_is, whole
from quire.ops.pages import TILE, PagedContext, Pages, Tiles

# Positions of a context in a part, at least: fewer where there is little to read, so that more programs read it.
LEAST_PART, PART = 256, 1024
PART_STEP = 128  # parts are multiples of it, as it is of every block
NUM_PROGRAMS = 264  # that parts are made for: two for each multiprocessor of a large GPU, which run together
FEW_PROGRAMS = NUM_PROGRAMS // 2  # below that contexts are cut into shorter parts
MAX_PARTS = 16
MAX_TOKENS_TIMES_PARTS = 4096  # for which there is memory


class Tiling(NamedTuple):
    rows: int  # of a program: positions times queries
    block: int  # positions of the context read at a time
    num_warps: int
    num_stages: int


# Few tokens: more programs with fewer rows. Some: wide blocks, which spill no register where heads and pages fit. Many:
# several programs share an SM, which is worth more. EXACT: tensor cores do not multiply float32, so its products are
# unrolled, and larger tiles take minutes to compile.
FEW_TOKENS, SOME_TOKENS = 1024, 4096
FEW, SOME, MANY, EXACT = Tiling(64, 64, 4, 2), Tiling(128, 128, 8, 2), Tiling(128, 64, 4, 2), Tiling(32, 32, 4, 2)
MAX_SOME_WIDTH = 128
# For any number of tokens, where every block is masked.
ONE_ORDER = Tiling(64, 64, 4, 3)


def tiling_of(q: jax.Array, pages: Pages) -> Tiling:
    tokens, _, _, size = q.shape
    if q.dtype == jnp.float32:
        return EXACT
    if tokens <= FEW_TOKENS:
        return FEW
    is_wide = size > MAX_SOME_WIDTH or len(pages) > 2  # codes have scales beside them, and are widened in registers
    return MANY if is_wide or tokens > SOME_TOKENS else SOME


def prefill_attention(
    q: jax.Array,
    context: PagedContext,
    out: jax.Array | None = None,
    *,
    tiling: Tiling | None = None,
    part: int | None = None,
    max_parts: int | None = None,
    masks_all: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Attention of q [t, k, g, h]; [t, k, g, h], written over `out`. Tokens of no tile stay as they are there.

    With a given `tiling`, `max_parts` of 1 and `masks_all`, a query's result depends on no other query: blocks begin at
    multiples of their size, and a block that a query does not see changes no bit of its sums. Otherwise blocks that all
    queries of a program see have a loop without masks, which the compiler may round differently.
    """
    spec, pages, tiles, sinks = context.spec, context.pages, context.tiles, context.sinks
    tokens, heads, group, _ = q.shape
    tiling = tiling or tiling_of(q, pages)
    max_parts = max_parts or max(1, min(MAX_PARTS, MAX_TOKENS_TIMES_PARTS // power_of_two(tokens)))
    positions = min(TILE, max(1, tiling.rows // power_of_two(group)))  # of a program
    programs = TILE // positions  # of a tile
    begins, ends = _context(spec, tiles, positions)  # of each program
    least: int | jax.Array = part or PART
    if part is None and max_parts > 1:
        least = _least_part(heads * (ends > begins).sum(), heads * (ends - begins).sum())
    each = least * -(-(ends - begins) // (least * max_parts))
    of_program = pl.BlockSpec((None,), lambda index, head, part: (index,))
    of_tile = pl.BlockSpec((None,), lambda index, head, part: (index // programs,))
    of_tiles = tiles.slots, tiles.starts, tiles.lengths, tiles.offsets
    operands = [context.page_table, begins, ends, each, *of_tiles, q, *pages]
    operands += [] if sinks is None else [sinks]
    operands += [] if out is None else [out]
    shapes = [array(q.shape, q.dtype), *(Parts.shapes(max_parts, q) if max_parts > 1 else ())]
    result, *parts = pl.pallas_call(
        partial(_read, spec, positions, programs, tiling.block, masks_all, len(pages)),
        grid=(len(tiles) * programs, heads, max_parts),
        in_specs=[whole(context.page_table), *[of_program] * 3, *[of_tile] * 4, *map(whole, operands[8:])],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        input_output_aliases={} if out is None else {len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="prefill_attention",
    )(*operands)
    if max_parts == 1:
        return result  # type: ignore[no-any-return]
    counts = -(-(ends - begins) // jnp.maximum(each, 1))
    return combine_parts(result, _by_token(counts, tiles, tokens), Parts(*parts), interpret=interpret)


def _least_part(num_programs: jax.Array, num_positions: jax.Array) -> jax.Array:
    """Positions of a part, at least, where so many programs would read so many together."""
    each = PART_STEP * -(-num_positions // (PART_STEP * NUM_PROGRAMS))
    return jnp.where(num_programs < FEW_PROGRAMS, jnp.clip(each, LEAST_PART, PART), PART)


def _context(spec: AttentionSpec, tiles: Tiles, positions: int) -> tuple[jax.Array, jax.Array]:
    """The positions that each program reads, from the first to the one before the end; none for padding."""
    first = jnp.arange(0, TILE, positions)
    starts = (tiles.starts[:, None] + first).reshape(-1)
    lengths = jnp.clip(tiles.lengths[:, None] - first, 0, positions).reshape(-1)
    ends = jnp.where(lengths > 0, starts + lengths, 0)
    begins = spec.first_seen(starts)
    return jnp.where(lengths > 0, begins, 0), ends


def _by_token(counts: jax.Array, tiles: Tiles, tokens: int) -> jax.Array:
    """The number of parts of each token's context; 1 for tokens of no tile."""
    at = jnp.arange(TILE)
    of_tiles = jnp.repeat(counts.reshape(len(tiles), -1), TILE * len(tiles) // len(counts), axis=1)
    index = jnp.where(at < tiles.lengths[:, None], tiles.offsets[:, None] + at, tokens)
    return jnp.ones(tokens, jnp.int32).at[index].set(of_tiles, mode="drop")


def _read(
    spec: AttentionSpec,
    positions: int,
    programs: int,
    block: int,
    masks_all: bool,
    num_page_arrays: int,
    table_ref: Any,
    begin_ref: Any,
    end_ref: Any,
    each_ref: Any,
    slot_ref: Any,
    start_ref: Any,
    length_ref: Any,
    offset_ref: Any,
    q_ref: Any,
    *others: Any,
) -> None:
    within, head, part = pl.program_id(0) % programs * positions, pl.program_id(1), pl.program_id(2)
    num_outputs = 1 if pl.num_programs(2) == 1 else 4
    out_ref, *part_refs = others[-num_outputs:]
    begin, end, each = begin_ref[...], end_ref[...], each_ref[...]
    first = begin + part * each
    last = jnp.minimum(first + each, end)

    @pl.when(last > first)
    def _() -> None:
        _, _, group, size = q_ref.shape
        queries, width = power_of_two(group), power_of_two(size)
        length = length_ref[...] - within
        is_row = (jnp.arange(positions) < length)[:, None] & (jnp.arange(queries) < group)[None, :]
        real = is_row[:, :, None] & (jnp.arange(width) < size)
        token, query = offset_ref[...] + within + jnp.arange(positions), jnp.arange(queries)
        at_token = token[:, None, None], head, query[None, :, None], jnp.arange(width)[None, None, :]
        q = plgpu.load(q_ref.at[at_token], mask=real, other=0.0).reshape(positions * queries, width)
        at_query = start_ref[...] + within + jnp.arange(positions * queries) // queries
        context = _Context(table_ref, slot_ref[...], head, others[:num_page_arrays], end)
        rows = jnp.arange(positions * queries)
        sinks = load_sinks(spec, others[num_page_arrays : num_page_arrays + 1], head, rows % queries, part == 0)
        empty = Softmax.begin(len(q), width, sinks)
        start = None if masks_all else start_ref[...] + within
        softmax = _softmax(spec, block, q, at_query, start, context, first, last, empty)
        is_whole = end - begin <= each
        out = softmax.result().reshape(positions, queries, width).astype(out_ref.dtype)
        plgpu.store(out_ref.at[at_token], out, mask=real & is_whole)
        if part_refs:
            at_part = part, token[:, None], head, query[None, :]
            Parts(*part_refs).store(spec, softmax, at_part, is_row & ~is_whole)


class _Context(NamedTuple):
    """The keys and values of one sequence and head."""

    table: Any
    slot: Any
    head: Any
    pages: Any
    end: Any


def _softmax(
    spec: AttentionSpec,
    block: int,
    q: jax.Array,
    at_query: jax.Array,  # the position of each row of q
    start: jax.Array | None,  # the first of them; None: all blocks are masked
    context: _Context,
    first: jax.Array,
    last: jax.Array,
    softmax: Softmax,
) -> Softmax:
    """A softmax that has empty, with q over the positions from `first` to before `last`."""
    _, page_size, _, size = context.pages[0].shape
    width = q.shape[1]
    is_feature = (jnp.arange(width) < size)[None, :]

    def read(masked: bool, index: jax.Array, so_far: Softmax) -> Softmax:
        at = index * block + jnp.arange(block)
        pages, offsets = where_is(context.table, context.slot, index, block, page_size, context.end)
        where = pages, offsets, context.head, jnp.arange(width)[None, :]
        if not masked and width == size:
            return so_far.add(spec, q, Block.load(context.pages, where, None, None), None)
        # Positions behind the window of every query may hold anything: they are not loaded.
        is_here = (at >= first) & (at < last)
        loaded = Block.load(context.pages, where, is_here, is_feature)
        seen = (at[None, :] <= at_query[:, None]) & is_here[None, :]
        if not spec.sees_all:
            seen &= at[None, :] >= spec.first_seen(at_query)[:, None]
        return so_far.add(spec, q, loaded, seen if masked else None)

    masked_from, num_blocks = first // block, (last + block - 1) // block
    if spec.sees_all and start is not None:  # everything before the first query is seen by all
        masked_from = jnp.clip(start // block, first // block, num_blocks)
        softmax = jax.lax.fori_loop(first // block, masked_from, partial(read, False), softmax)
    whole_softmax: Softmax = jax.lax.fori_loop(masked_from, num_blocks, partial(read, True), softmax)
    return whole_softmax
