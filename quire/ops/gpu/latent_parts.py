"""Contexts of latent attention in parts: how they are divided, and how the results are put together.

A part is the work of one program. Its length depends on all the contexts of a step, so that few long ones fill a device
as many short ones do. Results of parts are added by their weights in the softmax, in order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import MASKED, array, power_of_two, whole


class SplitPolicy(NamedTuple):
    """The division of contexts into parts."""

    least: int  # positions of a part, unless its context has fewer
    programs: int  # that all contexts together are cut for


class ContextList(NamedTuple):
    """Parts [n] of the contexts of runs [r]. Parts behind the last have no positions.

    Parts of contexts that have several leave their results in places, those of one context side by side.
    """

    runs: jax.Array  # [n]
    begins: jax.Array  # [n]: positions
    ends: jax.Array  # [n]
    places: jax.Array  # [n]; what a part that is a whole context has here is not read
    counts: jax.Array  # [r]: parts of each context
    first_places: jax.Array  # [r]
    num_places: int


def whole_contexts(ends: jax.Array) -> ContextList:
    """A part for each."""
    runs = jnp.arange(len(ends), dtype=jnp.int32)
    return ContextList(runs, jnp.zeros_like(ends), ends, runs, (ends > 0).astype(jnp.int32), runs, 0)


def context_list(ends: jax.Array, block: int, split: SplitPolicy) -> ContextList:
    """Of contexts that have so many positions, [r], cut at multiples of `block`."""
    count = len(ends)
    # One more, for what a sum in float32 may be wrong by. Contexts of one length become no more parts than there are
    # programs: a few parts more would wait for all others.
    least = jnp.maximum(split.least, (ends.astype(jnp.float32).sum() / split.programs).astype(jnp.int32) + 1)
    each = block * jnp.maximum(-(-ends // (block * jnp.maximum(ends // least, 1))), 1)
    counts = -(-ends // each)
    bounds, place_bounds = jnp.cumsum(counts), jnp.cumsum(jnp.where(counts > 1, counts, 0))
    numbers = jnp.arange(count + split.programs, dtype=jnp.int32)
    runs = jnp.minimum(jnp.searchsorted(bounds, numbers, side="right", method="compare_all"), count - 1)
    within = numbers - (bounds - counts)[runs]
    is_real = numbers < bounds[-1]
    begins = jnp.where(is_real, within * each[runs], 0)
    first_places = place_bounds - counts
    return ContextList(
        runs.astype(jnp.int32),
        begins,
        jnp.where(is_real, jnp.minimum(begins + each[runs], ends[runs]), 0),
        first_places[runs] + within,
        counts,
        first_places,
        split.programs,
    )


LEAST_PARTS, MOST_PARTS = 8, 64  # of one context that a program reads at a time
NUMBERS = 4096  # that it reads at a time


class Rows(NamedTuple):
    """The rows of a program: tokens, and of each token some queries of one head of keys."""

    tokens: int
    queries: int

    @property
    def total(self) -> int:
        return self.tokens * self.queries

    def where(self, tile: Any, group: int) -> tuple[jax.Array, Any, jax.Array]:
        """Of each row the token, and the query: [rows] each; and the head of keys, in a tile of heads."""
        row, tiles = jnp.arange(self.total), -(-group // self.queries)
        query = jax.lax.rem(tile, tiles) * self.queries + jax.lax.rem(row, self.queries)
        return jax.lax.div(row, self.queries), jax.lax.div(tile, tiles), query


class LatentParts(NamedTuple):
    """Places n, with tiles of heads i, rows m of a program and features f."""

    outs: Any  # [n, i, m, f]
    highest: Any  # [n, i, m], as exponents of two
    totals: Any  # [n, i, m]

    @classmethod
    def shapes(cls, places: int, tiles: int, rows: Rows, features: int) -> "LatentParts":
        of_rows = array((places, tiles, rows.total), jnp.float32)
        return cls(array((*of_rows.shape, features), jnp.float32), of_rows, of_rows)


def combine_latent_parts(
    out: jax.Array,
    offsets: jax.Array,
    lengths: jax.Array,
    listed: ContextList,
    parts: LatentParts,
    rows: Rows,
    most: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`out` [t, k, g, f] with the contexts of runs put together that have several parts, `most` each.

    A run with one part keeps its result. One with none becomes zero. A run has its first token at an offset, and a
    length.
    """
    runs, (_, tiles, _, features) = len(offsets), parts.outs.shape
    at_a_time = min(MOST_PARTS, max(LEAST_PARTS, power_of_two(most // runs)))
    width = min(power_of_two(features), NUMBERS // at_a_time)
    of_run = pl.BlockSpec((None,), lambda run, row, slab: (run,))
    operands = [offsets, lengths, listed.counts, listed.first_places, *parts, out]
    result: jax.Array = pl.pallas_call(
        partial(_combine, rows, at_a_time, width, power_of_two(most)),
        grid=(runs, tiles * rows.total, -(-features // width)),
        in_specs=[*[of_run] * 4, *map(whole, operands[4:])],
        out_specs=whole(out),
        out_shape=array(out.shape, out.dtype),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="combine_latent_parts",
    )(*operands)
    return result


def _combine(
    rows: Rows,
    at_a_time: int,
    width: int,
    most: int,
    offset_ref: Any,
    length_ref: Any,
    count_ref: Any,
    first_ref: Any,
    outs_ref: Any,
    highest_ref: Any,
    totals_ref: Any,
    _written_over: Any,
    out_ref: Any,
) -> None:
    group, size = out_ref.shape[2:]
    tile, row = jax.lax.div(pl.program_id(1), rows.total), jax.lax.rem(pl.program_id(1), rows.total)
    tiles = -(-group // rows.queries)
    query = jax.lax.rem(tile, tiles) * rows.queries + jax.lax.rem(row, rows.queries)
    head, token = jax.lax.div(tile, tiles), jax.lax.div(row, rows.queries)
    count, first, feature = count_ref[...], first_ref[...], pl.program_id(2) * width + jnp.arange(width)

    @pl.when((count != 1) & (token < length_ref[...]) & (query < group))
    def _() -> None:
        part = jnp.arange(most)
        at = first + part, tile, row
        exponents = plgpu.load(highest_ref.at[at], mask=part < count, other=MASKED)
        totals = plgpu.load(totals_ref.at[at], mask=part < count, other=0.0)
        highest = exponents.max()
        total = (jnp.exp2(exponents - highest) * totals).sum()

        def add(index: jax.Array, so_far: jax.Array) -> jax.Array:
            part = index * at_a_time + jnp.arange(at_a_time)
            there = part < count
            exponents = plgpu.load(highest_ref.at[first + part, tile, row], mask=there, other=MASKED)
            shares = jnp.where(there, jnp.exp2(exponents - highest), 0.0)
            where = (first + part)[:, None], tile, row, feature[None, :]
            outs = plgpu.load(outs_ref.at[where], mask=there[:, None] & (feature < size)[None, :], other=0.0)
            return so_far + (shares[:, None] * outs).sum(axis=0)

        rounds = jax.lax.div(count + at_a_time - 1, at_a_time)
        out = jax.lax.fori_loop(0, rounds, add, jnp.zeros(width, jnp.float32)) / jnp.maximum(total, 1e-30)
        where = offset_ref[...] + token, head, query, feature
        plgpu.store(out_ref.at[where], out.astype(out_ref.dtype), mask=feature < size)
