"""Latent attention over pages: all heads of a token read the same vectors, which are their keys and their values.

One program computes the heads of one token, or of a few tokens of a prompt, over a part of their context. It loads each
position once: all heads meet its vector, whose first features are then the value. Those and the others are loaded
apart, as 512 and 64 are powers of two and 576 is not.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.latent_parts import (
    ContextList,
    LatentParts,
    Rows,
    SplitPolicy,
    combine_latent_parts,
    context_list,
    whole_contexts,
)
from quire.ops.gpu.tiles import MASKED, array, exponent_of_one, least_dot, load_masked, power_of_two, product, whole
from quire.ops.pages import TILE, PagedContext, Tiles


class Tiling(NamedTuple):
    rows: int  # of a program, at most: tokens times heads
    block: int  # positions read at a time
    num_warps: int
    num_stages: int
    slab: int = 512  # features of a value in one product, at most


# Of up to 16 rows, of more, and of more where a program may have but 99 KiB of shared memory. Products of float32 are
# written out, and larger ones take minutes to compile.
FEW, MANY, IN_LITTLE_MEMORY = Tiling(16, 32, 4, 3), Tiling(64, 32, 8, 2, slab=128), Tiling(32, 32, 8, 2)
EXACT = Tiling(16, 16, 4, 1, slab=128)
SPLIT = SplitPolicy(least=128, programs=264)  # two programs for each multiprocessor of a large GPU


def tiling_of(dtype: Any, rows: int, many: Tiling = MANY) -> Tiling:
    """`rows`: tokens times heads that read the same positions."""
    if dtype == jnp.float32:
        return EXACT
    return FEW if rows <= FEW.rows else many


def latent_attention(
    q: jax.Array,
    context: PagedContext,
    out: jax.Array | None = None,
    *,
    tiling: Tiling | None = None,
    split: SplitPolicy = SPLIT,
    many: Tiling = MANY,
    interpret: bool = False,
) -> jax.Array:
    """Attention of q [t, k, g, h] over keys [num_pages, page_size, k, h], the first of the pages' arrays;
    [t, k, g, value_dim], written over `out`.

    Tiles are all single tokens, or all of prefills. Tokens of no tile stay as they are in `out`; where there is none,
    anything may be there. Single tokens that are padding become zero. `many`: the tiling of many rows.
    """
    spec, tiles = context.spec, context.tiles
    assert spec.value_dim is not None
    assert spec.sees_all
    is_single = tiles.num_single > 0
    heads, group = q.shape[1:3]
    tiling = tiling or tiling_of(q.dtype, group if is_single else group * TILE, many)
    queries = min(tiling.rows, least_dot(group) if is_single else power_of_two(group))
    rows = Rows(1 if is_single else min(TILE, tiling.rows // queries), queries)
    tiles_of_heads = heads * -(-group // queries)
    split = split._replace(programs=max(1, split.programs // tiles_of_heads))
    runs = _runs(tiles, rows.tokens)
    ends = jnp.where(runs.lengths > 0, runs.starts + runs.lengths, 0)
    in_parts = is_single or len(runs.starts) < split.programs
    listed = context_list(ends, tiling.block, split) if in_parts else whole_contexts(ends)
    tasks = _tasks(runs, listed)
    operands = [context.page_table, tasks, q, context.pages[0]] + ([] if out is None else [out])
    shapes = [array((*q.shape[:3], spec.value_dim), q.dtype)]
    shapes += LatentParts.shapes(listed.num_places, tiles_of_heads, rows, spec.value_dim) if in_parts else ()
    result, *parts = pl.pallas_call(
        partial(_read, spec, tiling, rows),
        grid=(tiles_of_heads, len(tasks)),
        in_specs=[whole(operand) for operand in operands],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        input_output_aliases={} if out is None else {len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="latent_attention",
    )(*operands)
    if not in_parts:
        return result  # type: ignore[no-any-return]
    lengths = jnp.ones_like(runs.lengths) if is_single else runs.lengths
    given = runs.offsets, lengths, listed, LatentParts(*parts), rows, split.programs
    return combine_latent_parts(result, *given, interpret=interpret)


class _Runs(NamedTuple):
    """Consecutive tokens of a sequence, which one program computes; [r] each."""

    slots: jax.Array
    starts: jax.Array
    lengths: jax.Array
    offsets: jax.Array


def _runs(tiles: Tiles, tokens: int) -> _Runs:
    if tiles.num_single:
        return _Runs(tiles.slots, tiles.starts, tiles.lengths, jnp.arange(len(tiles), dtype=jnp.int32))
    first = jnp.arange(0, TILE, tokens)
    return _Runs(
        jnp.repeat(tiles.slots, len(first)),
        (tiles.starts[:, None] + first).reshape(-1),
        jnp.clip(tiles.lengths[:, None] - first, 0, tokens).reshape(-1),
        (tiles.offsets[:, None] + first).reshape(-1),
    )


def _tasks(runs: _Runs, listed: ContextList) -> jax.Array:
    """[n, 8]: the fields of each program's task."""
    of_runs = [field[listed.runs] for field in runs]
    is_whole = (listed.counts[listed.runs] == 1).astype(jnp.int32)
    return jnp.stack([*of_runs, listed.begins, listed.ends, listed.places, is_whole], axis=1)


class _Context(NamedTuple):
    """Positions of a sequence up to before `last`. Those of a block behind them are clamped to the last: they have no
    weight, and their own places may hold anything."""

    table: Any
    slot: Any
    head: Any
    last: Any
    keys: Any
    block: int

    def _positions(self, index: Any) -> Any:
        return jnp.minimum(index * self.block + jnp.arange(self.block), self.last - 1)

    def load_pages(self, index: Any) -> Any:
        """The page of a block, or those of its positions [s]. After the last block, they are those of the last."""
        page_size = self.keys.shape[1]
        if page_size % self.block:
            return self.table[self.slot, jax.lax.div(self._positions(index), page_size)]
        index = jnp.minimum(index, jax.lax.div(self.last - 1, self.block))
        return self.table[self.slot, jax.lax.div(index, page_size // self.block)]

    def load(self, pages: Any, index: Any, slab: "_Slab") -> jax.Array:
        """[s, f]; features that are not there are zero."""
        offsets = jax.lax.rem(self._positions(index), self.keys.shape[1])[:, None]
        where = pages if pages.ndim == 0 else pages[:, None], offsets, self.head, slab.features[None, :]
        mask = None if slab.is_full else jnp.broadcast_to(slab.is_there[None, :], (self.block, slab.width))
        return load_masked(self.keys, where, mask)


class _Slab(NamedTuple):
    """Features from `first` to before `end`, in as many as a product has."""

    first: int
    end: int
    width: int

    @classmethod
    def of_values(cls, spec: AttentionSpec, most: int) -> "list[_Slab]":
        rank = spec.value_dim or 0
        width = min(most, least_dot(rank))
        return [cls(first, rank, width) for first in range(0, rank, width)]

    @classmethod
    def of_others(cls, spec: AttentionSpec) -> "_Slab":
        rank = spec.value_dim or 0
        return cls(rank, spec.head_dim, least_dot(spec.head_dim - rank))

    @property
    def features(self) -> jax.Array:
        return self.first + jnp.arange(self.width)

    @property
    def is_full(self) -> bool:
        return self.first + self.width <= self.end

    @property
    def is_there(self) -> jax.Array:
        return self.features < self.end


class _Softmax(NamedTuple):
    """A softmax under way over rows [m], with the sums of each slab of values."""

    highest: jax.Array
    total: jax.Array
    outs: tuple[jax.Array, ...]

    def add(self, unit: float, scores: jax.Array, values: list[jax.Array]) -> "_Softmax":
        """With the scores [m, s] and values [s, f] of a block. A score that is MASKED weighs nothing, also where all
        are."""
        highest = jnp.maximum(self.highest, scores.max(axis=1))
        base = jnp.where(highest > MASKED, highest, 0.0) * unit
        weights = jnp.exp2(scores * unit - base[:, None])
        shrink = jnp.exp2((self.highest - highest) * unit)
        total = self.total * shrink + weights.sum(axis=1)
        pairs = zip(self.outs, values, strict=True)
        outs = (out * shrink[:, None] + product(weights.astype(value.dtype), value, 0) for out, value in pairs)
        return _Softmax(highest, total, tuple(outs))


def _read(
    spec: AttentionSpec, tiling: Tiling, rows: Rows, table_ref: Any, tasks_ref: Any, q_ref: Any, *others: Any
) -> None:
    keys_ref, out_ref, parts = others[0], *_outputs(others)
    tile, number = pl.program_id(0), pl.program_id(1)
    slot, start, length, offset, begin, last, place, is_whole = (tasks_ref[number, field] for field in range(8))

    @pl.when(last > begin)
    def _() -> None:
        token, head, query = rows.where(tile, q_ref.shape[2])
        is_row = (token < length) & (query < q_ref.shape[2])
        slabs = _Slab.of_values(spec, tiling.slab)
        all_slabs = [*slabs, _Slab.of_others(spec)]

        def load_queries(slab: _Slab) -> jax.Array:
            at = (offset + token)[:, None], head, query[:, None], slab.features[None, :]
            return plgpu.load(q_ref.at[at], mask=is_row[:, None] & slab.is_there[None, :], other=0.0)

        queries = [load_queries(slab) for slab in all_slabs]
        context = _Context(table_ref, slot, head, last, keys_ref, tiling.block)
        limits = jnp.minimum(start + token, last - 1)  # the last position that a row sees

        def read(index: jax.Array, state: tuple[_Softmax, Any]) -> tuple[_Softmax, Any]:
            so_far, pages = state
            next_pages = context.load_pages(index + 1)
            keys = [context.load(pages, index, slab) for slab in all_slabs]
            scores = sum(product(q, key, 1) for q, key in zip(queries, keys, strict=True))
            if spec.softcap is not None:
                scores = jnp.tanh(scores * (spec.scale / spec.softcap))
            at = index * tiling.block + jnp.arange(tiling.block)
            scores = jnp.where(at[None, :] <= limits[:, None], scores, MASKED)
            return so_far.add(exponent_of_one(spec), scores, keys[:-1]), next_pages

        first, count = jax.lax.div(begin, tiling.block), jax.lax.div(last + tiling.block - 1, tiling.block)
        nothing = jnp.full(rows.total, MASKED, jnp.float32), jnp.zeros(rows.total, jnp.float32)
        empty = _Softmax(*nothing, (jnp.zeros((rows.total, slabs[0].width), jnp.float32),) * len(slabs))
        softmax, _ = jax.lax.fori_loop(first, count, read, (empty, context.load_pages(first)))

        inverse = 1.0 / jnp.maximum(softmax.total, 1e-30)
        for out, slab in zip(softmax.outs, slabs, strict=True):
            is_there = is_row[:, None] & slab.is_there[None, :]
            at_row, at_feature = jnp.arange(rows.total)[:, None], slab.features[None, :]
            where = (offset + token)[:, None], head, query[:, None], at_feature
            result = (out * inverse[:, None]).astype(out_ref.dtype)
            plgpu.store(out_ref.at[where], result, mask=is_there & (is_whole == 1))
            if parts is not None:
                plgpu.store(parts.outs.at[place, tile, at_row, at_feature], out, mask=is_there & (is_whole == 0))
        if parts is not None:
            row, mask = jnp.arange(rows.total), is_row & (is_whole == 0)
            exponents = softmax.highest * exponent_of_one(spec)
            plgpu.store(parts.highest.at[place, tile, row], exponents, mask=mask)
            plgpu.store(parts.totals.at[place, tile, row], softmax.total, mask=mask)


def _outputs(others: tuple[Any, ...]) -> tuple[Any, LatentParts | None]:
    """The result and the parts, of which there may be none: `others` are the keys, what is written over, and these."""
    if len(others) <= 3:
        return others[-1], None
    return others[-4], LatentParts(*others[-3:])
