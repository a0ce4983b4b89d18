"""Tokens drawn from logits in two launches, of which only the first reads all logits, once.

It stores, for each block of the vocabulary, the highest logit, its place, and the sum of weights relative to it. The
second launch picks a block by these sums, then a token within. A row's bits do not depend on other rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, power_of_two, whole
from quire.ops.sampling_kernels import BLOCK, Drawn

AT_ONCE = 16  # blocks of a program
NUM_WARPS = 4
LEAST_INVERSE = 2.0**-126  # the least normal float32: minus infinity times it is minus infinity
LOWEST = -3.4028234663852886e38  # the least float32: minus infinity minus it is minus infinity


def draw_tokens(logits: jax.Array, temperature: jax.Array, uniform: jax.Array, *, interpret: bool = False) -> Drawn:
    rows, size = logits.shape
    programs = pl.cdiv(size, BLOCK * AT_ONCE)
    of_blocks = [array((rows, programs * AT_ONCE), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32)]
    inverse = jnp.maximum(1.0 / temperature, LEAST_INVERSE)
    call = partial(pl.pallas_call, interpret=interpret)
    params = plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1)
    highest, places, sums = call(
        _look,
        grid=(rows, programs),
        in_specs=[whole(logits), pl.BlockSpec((None,), lambda row, _: (row,))],
        out_specs=list(map(whole, of_blocks)),
        out_shape=of_blocks,
        compiler_params=params,
        name="look_at_logits",
    )(logits, inverse)
    of_rows = [array((rows,), dtype) for dtype in (jnp.int32, jnp.int32, jnp.float32)]
    of_row = pl.BlockSpec((None,), lambda row: (row,))
    tokens, likeliest, most = call(
        _draw,
        grid=(rows,),
        in_specs=[whole(logits), of_row, of_row, of_row, *map(whole, (highest, places, sums))],
        out_specs=[of_row] * 3,
        out_shape=of_rows,
        compiler_params=params,
        name="draw_tokens",
    )(logits, inverse, uniform[:, 0], uniform[:, 1], highest, places, sums)
    return Drawn(tokens, likeliest, most)


def _look(logits_ref: Any, inverse_ref: Any, highest_ref: Any, places_ref: Any, sums_ref: Any) -> None:
    row, size = pl.program_id(0), logits_ref.shape[1]
    block = pl.program_id(1) * AT_ONCE + jnp.arange(AT_ONCE)
    at = block[:, None] * BLOCK + jnp.arange(BLOCK)[None, :]
    logits = plgpu.load(logits_ref.at[row, at], mask=at < size, other=-jnp.inf).astype(jnp.float32)
    has_nan = jnp.isnan(logits).astype(jnp.int32).max(axis=1) > 0
    highest = jnp.where(has_nan, jnp.nan, logits.max(axis=1))
    places = jnp.where(logits == highest[:, None], at, size).min(axis=1)
    plgpu.store(highest_ref.at[row, block], highest)
    plgpu.store(places_ref.at[row, block], places)
    plgpu.store(sums_ref.at[row, block], _weights(logits, highest[:, None], inverse_ref[...]).sum(axis=1))


def _draw(
    logits_ref: Any,
    inverse_ref: Any,
    of_block_ref: Any,
    within_ref: Any,
    highest_ref: Any,
    places_ref: Any,
    sums_ref: Any,
    tokens_ref: Any,
    likeliest_ref: Any,
    most_ref: Any,
) -> None:
    row, size, count, inverse = pl.program_id(0), logits_ref.shape[1], highest_ref.shape[1], inverse_ref[...]
    block = jnp.arange(power_of_two(count))
    highest = plgpu.load(highest_ref.at[row, block], mask=block < count, other=-jnp.inf)
    places = plgpu.load(places_ref.at[row, block], mask=block < count, other=size)
    sums = plgpu.load(sums_ref.at[row, block], mask=block < count, other=0.0)
    has_nan = jnp.isnan(highest).astype(jnp.int32).max() > 0
    most = jnp.where(has_nan, jnp.nan, highest.max())
    most_ref[...] = most
    likeliest_ref[...] = jnp.where(highest == most, places, size).min()
    chosen = _pick(sums * _weights(highest, most, inverse), of_block_ref[...])
    at = chosen * BLOCK + jnp.arange(BLOCK)
    logits = plgpu.load(logits_ref.at[row, at], mask=at < size, other=-jnp.inf).astype(jnp.float32)
    tokens_ref[...] = chosen * BLOCK + _pick(_weights(logits, logits.max(), inverse), within_ref[...])


def _weights(logits: jax.Array, highest: Any, inverse: jax.Array) -> jax.Array:
    """Relative to the highest, whose weight is one."""
    return jnp.exp((logits - jnp.maximum(highest, LOWEST)) * inverse)


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """As the sampler's: the first place at which the running sum exceeds its share, never one of weight zero."""
    place, size = jnp.arange(len(weights)), len(weights)
    running = jnp.cumsum(weights)
    total = jnp.where(place == size - 1, running, 0.0).sum()
    first = jnp.where((running > uniform * total) & (weights > 0), place, size).min()
    last = jnp.where(weights > 0, place, 0).max()  # rounding can leave none
    return jnp.where(first < size, first, last)
