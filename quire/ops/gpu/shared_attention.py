"""Attention of decodes to the positions that they share with others.

Sequences that begin with the same pages would each read them. Here up to TILE of them, with all the queries of a key
head, are rows of one matrix product, as positions of a prompt are: the pages are read once for all. Contexts are cut
into parts, as many as fill the device. The positions that follow, of each sequence alone, are read by
`decode_attention`, which puts all parts together.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.parts import Parts
from quire.ops.gpu.tiles import Block, Softmax, power_of_two, where_is, whole
from quire.ops.pages import SHARED_STEP, TILE, PagedContext

PART = 256  # positions, at least
MAX_PARTS = 8  # of one shared prefix


class Tiling(NamedTuple):
    rows: int  # of a program: tokens times queries
    block: int  # positions read at a time; SHARED_STEP is a multiple of it
    num_warps: int
    num_stages: int
    num_programs: int = 264  # that parts are made for: two for each multiprocessor of a large GPU, which run together


# Of few tokens there are more programs with fewer rows. Products of float32 are written out: larger ones take minutes
# to compile.
FEW_TOKENS = 64
FEW, MANY, EXACT = Tiling(64, 64, 4, 2), Tiling(128, 64, 4, 2), Tiling(32, 32, 4, 2)


class SharedParts(NamedTuple):
    """Parts of contexts that are computed, from the first part on; [t] of each of the tokens."""

    parts: Parts
    counts: jax.Array  # parts
    ends: jax.Array  # positions that these have read


def shared_attention(
    q: jax.Array,
    context: PagedContext,
    room: int,
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> SharedParts:
    """Attention of the first tokens of q [t, k, g, h], the single ones, to the positions that they share. The layer
    sees all positions. There is room for so many more parts of each token."""
    spec, pages, shared = context.spec, context.pages, context.tiles.shared
    assert shared is not None
    _, heads, group, _ = q.shape
    tokens = len(shared.tile_of)
    tiling = tiling or (EXACT if q.dtype == jnp.float32 else FEW if tokens <= FEW_TOKENS else MANY)
    size = min(TILE, max(1, tiling.rows // power_of_two(group)))  # tokens of a program
    of_tile = TILE // size  # programs
    each = _part_size(shared.lengths, heads * of_tile, tiling.num_programs)  # of each tile
    counts = -(-shared.lengths // each)
    rows = shared.tokens.reshape(-1, size)
    numbers = jnp.where(rows.max(axis=1) >= 0, jnp.repeat(counts, of_tile), 0)  # parts, in the list of work
    bounds = jnp.cumsum(jnp.pad(numbers, (0, power_of_two(len(numbers)) - len(numbers))))
    operands = [context.page_table, bounds, rows, shared.slots, shared.lengths, each, q, *pages]
    shapes = Parts.shapes(MAX_PARTS + room, q[:tokens])
    parts = pl.pallas_call(
        partial(_read, spec, tiling.block, of_tile),
        grid=(heads, -(-tiling.num_programs // heads) + len(numbers)),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=[*shapes],
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="shared_attention",
    )(*operands)
    is_shared, at = shared.tile_of >= 0, jnp.maximum(shared.tile_of, 0)
    return SharedParts(Parts(*parts), jnp.where(is_shared, counts[at], 0), jnp.where(is_shared, shared.lengths[at], 0))


def _part_size(lengths: jax.Array, programs: int, wanted: int) -> jax.Array:
    """Positions of each tile's parts, which are alike. In all there are at most as many programs as are `wanted`, or
    one of each tile; `programs` are those of a tile with one part."""
    load = jnp.maximum(programs * lengths.sum(), 1)
    most = jnp.minimum(MAX_PARTS, -(-lengths // PART))
    counts = jnp.clip(wanted * lengths // load, 1, jnp.maximum(most, 1))
    return jnp.maximum(SHARED_STEP * -(-lengths // (SHARED_STEP * counts)), SHARED_STEP)


def _read(
    spec: AttentionSpec,
    block: int,
    of_tile: int,
    table_ref: Any,
    bounds_ref: Any,
    tokens_ref: Any,
    slots_ref: Any,
    lengths_ref: Any,
    each_ref: Any,
    q_ref: Any,
    *others: Any,
) -> None:
    page_refs, part_refs = others[:-3], others[-3:]
    head, number, bounds = pl.program_id(0), pl.program_id(1), bounds_ref[...]

    @pl.when(number < bounds.max())
    def _() -> None:
        row = (bounds <= number).astype(jnp.int32).sum()
        part = number - jnp.where(bounds <= number, bounds, 0).max()
        tile = row // of_tile
        slot, each = slots_ref[tile], each_ref[tile]
        first = part * each
        last = jnp.minimum(first + each, lengths_ref[tile])
        _, _, group, size = q_ref.shape
        queries, width = power_of_two(group), power_of_two(size)
        token = tokens_ref[row, jnp.arange(tokens_ref.shape[1])]
        is_row = (token >= 0)[:, None] & (jnp.arange(queries) < group)[None, :]
        # Padding is beyond the arrays: an interpreter of this kernel must not take it for the last token.
        token = jnp.where(token < 0, part_refs[0].shape[1], token)
        is_feature = jnp.arange(width) < size
        at_token = token[:, None, None], head, jnp.arange(queries)[None, :, None], jnp.arange(width)[None, None, :]
        q = plgpu.load(q_ref.at[at_token], mask=is_row[:, :, None] & is_feature, other=0.0)
        q = q.reshape(len(token) * queries, width)

        def read(index: jax.Array, so_far: Softmax) -> Softmax:
            pages, offsets = where_is(table_ref, slot, index, block, page_refs[0].shape[1], last)
            where = pages, offsets, head, jnp.arange(width)[None, :]
            is_here = None if width == size else index * block + jnp.arange(block) < last
            loaded = Block.load(page_refs, where, is_here, None if width == size else is_feature[None, :])
            return so_far.add(spec, q, loaded, None)

        softmax = jax.lax.fori_loop(first // block, last // block, read, Softmax.begin(len(q), width))
        Parts(*part_refs).store(spec, softmax, (part, token[:, None], head, jnp.arange(queries)[None, :]), is_row)
