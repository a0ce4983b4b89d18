"""Attention of decodes to the positions that they share with others.

Sequences that begin with the same pages would each read them. Here up to TILE of them, with all the queries of a key
head, are rows of one matrix product, as positions of a prompt are: the pages are read once for all. Contexts are cut
into parts, as many as fill the device. Those that follow, of each sequence alone, are the business of
`decode_attention`, which puts all parts together.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention_spec import AttentionSpec
from quire.ops.gpu.parts import Parts
from quire.ops.gpu.tiles import Block, Softmax, power_of_two, where_is, whole
from quire.ops.pages import TILE, Pages, SharedPrefixes

PART = 256  # positions, of which a part has a multiple
MAX_PARTS = 8  # of one shared prefix


class Tiling(NamedTuple):
    rows: int  # of a program: tokens times queries
    block: int  # positions read at a time; SHARED_STEP is a multiple of it
    num_warps: int
    num_stages: int
    num_programs: int = 264  # that parts are made for: two for each multiprocessor of a large GPU run at a time


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
    spec: AttentionSpec,
    q: jax.Array,
    pages: Pages,
    page_table: jax.Array,
    shared: SharedPrefixes,
    room: int,
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> SharedParts:
    """Attention of the first tokens of q [t, k, g, h], the single ones, to the positions that they share. The layer
    sees all positions. There is room for so many more parts of each token."""
    _, heads, group, _ = q.shape
    tokens = len(shared.tile_of)
    tiling = tiling or (EXACT if q.dtype == jnp.float32 else FEW if tokens <= FEW_TOKENS else MANY)
    size = min(TILE, max(1, tiling.rows // power_of_two(group)))  # tokens of a program
    programs = TILE // size  # of a tile
    each = _part_size(shared.lengths, heads * programs, tiling.num_programs)  # of each tile
    of_program = pl.BlockSpec((None, size), lambda index, head, part: (index, 0))
    of_tile = pl.BlockSpec((None,), lambda index, head, part: (index // programs,))
    operands = [page_table, shared.tokens.reshape(-1, size), shared.slots, shared.lengths, each, q, *pages]
    shapes = Parts.shapes(MAX_PARTS + room, q[:tokens])
    parts = pl.pallas_call(
        partial(_read, spec, tiling.block),
        grid=(len(shared.slots) * programs, heads, MAX_PARTS),
        in_specs=[whole(page_table), of_program, *[of_tile] * 3, *map(whole, operands[5:])],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=[*shapes],
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="shared_attention",
    )(*operands)
    is_shared, at = shared.tile_of >= 0, jnp.maximum(shared.tile_of, 0)
    counts = jnp.where(is_shared, (-(-shared.lengths // each))[at], 0)
    return SharedParts(Parts(*parts), counts, jnp.where(is_shared, shared.lengths[at], 0))


def _part_size(lengths: jax.Array, programs: int, wanted: int) -> jax.Array:
    """Positions of each tile's parts, for as many programs as are `wanted` in all; `programs` are those of a tile."""
    load = programs * lengths.sum()  # fits: there are fewer tiles than sequences
    each = PART * -(-load // (PART * wanted))
    least = PART * -(-lengths // (PART * MAX_PARTS))
    return jnp.maximum(jnp.maximum(each, least), PART)


def _read(
    spec: AttentionSpec,
    block: int,
    table_ref: Any,
    tokens_ref: Any,
    slot_ref: Any,
    length_ref: Any,
    each_ref: Any,
    q_ref: Any,
    *others: Any,
) -> None:
    page_refs, part_refs = others[:-3], others[-3:]
    head, part = pl.program_id(1), pl.program_id(2)
    first = part * each_ref[...]
    last = jnp.minimum(first + each_ref[...], length_ref[...])
    # Padding is beyond the arrays: an interpreter of this kernel must not take it for the last token.
    token = jnp.where(tokens_ref[...] < 0, part_refs[0].shape[1], tokens_ref[...])

    @pl.when((last > first) & (tokens_ref[...].max() >= 0))
    def _() -> None:
        _, _, group, size = q_ref.shape
        queries, width = power_of_two(group), power_of_two(size)
        is_row = (tokens_ref[...] >= 0)[:, None] & (jnp.arange(queries) < group)[None, :]
        is_feature = jnp.arange(width) < size
        at_token = token[:, None, None], head, jnp.arange(queries)[None, :, None], jnp.arange(width)[None, None, :]
        q = plgpu.load(q_ref.at[at_token], mask=is_row[:, :, None] & is_feature, other=0.0)
        q = q.reshape(len(token) * queries, width)
        slot = slot_ref[...]

        def read(index: jax.Array, so_far: Softmax) -> Softmax:
            pages, offsets = where_is(table_ref, slot, index, block, page_refs[0].shape[1], last)
            where = pages, offsets, head, jnp.arange(width)[None, :]
            is_here = None if width == size else index * block + jnp.arange(block) < last
            loaded = Block.load(page_refs, where, is_here, None if width == size else is_feature[None, :])
            return so_far.add(spec, q, loaded, None)

        softmax = jax.lax.fori_loop(first // block, last // block, read, Softmax.begin(len(q), width))
        Parts(*part_refs).store(spec, softmax, (part, token[:, None], head, jnp.arange(queries)[None, :]), is_row)
