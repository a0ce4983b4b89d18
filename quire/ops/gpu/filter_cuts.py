"""The values at which top-k, top-p, min-p and typical-p cut each row of logits: one program for each row.

A search looks for a distance: the least such that what is no farther weighs enough. Distances are not negative, so that
their bits sort as they do, and the search is over those: exact, without a sort. Every pass over the row cuts the range
into eight, and ends at the distances that do occur in it. A row that asks for nothing is not read.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array

INFINITY = 0x7F800000  # as bits of float32
EIGHTH = 0x3E000000  # so is this
DOUBLE = 1 << 23  # what doubling adds to the bits
WIDE = 1 << 30  # only the first range is wider
WAYS = range(1, 8)  # the limits within a range
MOST_PASSES = 11  # the first leaves at most thirty bits, and each of the others finds three

# Adds the distances of a block, and what was added up over the blocks before it.
Add = Callable[[jax.Array, Any], Any]


class Tiling(NamedTuple):
    block: int  # tokens of an operation
    num_blocks: int  # read at a time
    num_warps: int


# Four tokens for each thread are one load; two blocks keep enough loads under way where there are few rows.
TILING = Tiling(2048, 2, 16)


def filter_cuts(
    logits: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    typical_p: jax.Array,
    *,
    tiling: Tiling = TILING,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For logits [r, v], whose highest is 0, the limits [r] of a cut, a centre and a spread.

    What the filters leave, one after the other, is where `logits >= cut` and `abs(-logits - centre) <= spread`. Limits
    are those of `filtered` in `sample/filters.py`, off where top_k is v, top_p or typical_p 1 and min_p 0, but that
    tokens are level where their logits are equal, not their probabilities.

    The logits are returned in place, because the limits hold for the numbers that were read: XLA might compute them a
    second time and round them differently.
    """
    rows, size = logits.shape
    of_row = pl.BlockSpec((None,), lambda row: (row,))
    whole = pl.BlockSpec((None, size), lambda row: (row, 0))
    out: tuple[jax.Array, jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        partial(_cut_row, tiling),
        grid=(rows,),
        in_specs=[whole, *[of_row] * 4],
        out_specs=[whole, *[of_row] * 3],
        out_shape=[array(logits.shape, logits.dtype), *[array((rows,), jnp.float32)] * 3],
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=1),
        interpret=interpret,
        name="filter_cuts",
    )(logits, top_k, top_p, -jnp.log(min_p), typical_p)
    return out


def _cut_row(
    tiling: Tiling,
    logits_ref: Any,
    top_k_ref: Any,
    top_p_ref: Any,
    farthest_ref: Any,
    typical_p_ref: Any,
    same_ref: Any,
    cut_ref: Any,
    centre_ref: Any,
    spread_ref: Any,
) -> None:
    (size,) = logits_ref.shape

    def over_row(add: Add, begin: Any, wanted: jax.Array | None = None) -> Any:
        def read(index: jax.Array, so_far: Any) -> Any:
            starts = [(index * tiling.num_blocks + block) * tiling.block for block in range(tiling.num_blocks)]
            places = [start + jnp.arange(tiling.block) for start in starts]
            loaded = [plgpu.load(logits_ref.at[at], mask=at < size, other=-jnp.inf) for at in places]
            for block in loaded:
                so_far = add(jnp.abs(block), so_far)
            return so_far

        reads = jnp.int32(-(-size // (tiling.block * tiling.num_blocks)))
        return jax.lax.fori_loop(0, reads if wanted is None else jnp.where(wanted, reads, 0), read, begin)

    zeros = jnp.zeros(tiling.block, jnp.float32)
    search = partial(_search, over_row, tiling.block)

    top_k, top_p, typical_p = top_k_ref[...], top_p_ref[...], typical_p_ref[...]
    limit = search(lambda away: (away, jnp.ones_like(away)), top_k.astype(jnp.float32), top_k < size)
    # Weights are always added in the same order, so that a share of them all can be reached.
    total = over_row(lambda away, sum: sum + jnp.where(away <= limit, jnp.exp(-away), 0.0), zeros, top_p < 1).sum()
    limit = jnp.minimum(limit, search(lambda away: (away, jnp.exp(-away)), top_p * total, top_p < 1))
    limit = jnp.minimum(limit, farthest_ref[...])

    def weights(away: jax.Array) -> jax.Array:
        return jnp.where(away <= limit, jnp.exp(-away), 0.0)

    def moments(away: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weight = weights(away)
        return sums[0] + weight, sums[1] + jnp.where(weight > 0, weight * away, 0.0)

    def from_centre(away: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(away <= limit, jnp.abs(away - centre), jnp.inf), weights(away)

    total, first = (sums.sum() for sums in over_row(moments, (zeros, zeros), typical_p < 1))
    # A token's information is its distance from the highest and a constant, which its entropy, their mean, has too.
    centre = jnp.where(typical_p < 1, first / total, 0.0)
    cut_ref[...] = -limit
    centre_ref[...] = centre
    spread_ref[...] = search(from_centre, typical_p * total, typical_p < 1)


def _search(
    over_row: Callable[[Add, Any], Any],
    block: int,
    weighed: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    target: jax.Array,
    wanted: jax.Array,
) -> jax.Array:
    """The least distance such that what is no farther weighs as much as `target`; infinite where it is not `wanted`.

    `weighed` maps a distance from the highest to the distance searched for, and its weight. Where all weigh too little,
    the result is the greatest distance.
    """

    def narrowed(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The answer is one of low, ..., high - 1."""
        low, high = bounds
        # Most answers are not far from 1, and small floats have more bits than they deserve.
        start = jnp.where(high - low > WIDE, EIGHTH, low)
        step = jnp.where(high - low > WIDE, DOUBLE, (high - low + 7) >> 3)

        def add(away: jax.Array, so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            distances, weights = weighed(away)
            bits = jax.lax.bitcast_convert_type(distances, jnp.int32)
            *sums, nearest, farthest = so_far
            for way in WAYS:
                sums[way - 1] += jnp.where(bits < start + way * step, weights, 0.0)
            nearest = jnp.minimum(nearest, jnp.where(bits >= low, bits, INFINITY))
            return *sums, nearest, jnp.maximum(farthest, jnp.where(bits < high, bits, 0))

        zeros = [jnp.zeros(block, jnp.float32) for _ in WAYS]
        none = jnp.full(block, INFINITY, jnp.int32), jnp.zeros(block, jnp.int32)
        *sums, nearest, farthest = over_row(add, (*zeros, *none))
        short = sum((total.sum() < target).astype(jnp.int32) for total in sums)
        high = jnp.where(short < len(WAYS), jnp.minimum(start + (short + 1) * step, high), high)
        low = jnp.where(short > 0, start + short * step, low)
        return jnp.maximum(low, nearest.min()), jnp.minimum(high, farthest.max() + 1)

    whole = jnp.where(wanted, jnp.int32(0), jnp.int32(INFINITY)), jnp.int32(INFINITY + 1)

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        narrower: tuple[jax.Array, jax.Array] = jax.lax.cond(bounds[1] - bounds[0] > 1, narrowed, lambda x: x, bounds)
        return narrower

    # Not a while loop: behind one Triton does not know how logits are aligned, and reads them one by one.
    low, _ = jax.lax.fori_loop(0, MOST_PASSES, narrow, whole)
    return jax.lax.bitcast_convert_type(jnp.minimum(low, INFINITY), jnp.float32)
