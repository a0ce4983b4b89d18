"""Parts of contexts of latent attention, put together by the weights that they have in a softmax, in their order."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.context_list import ContextList
from quire.ops.gpu.tiles import MASKED, array, power_of_two, whole

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
