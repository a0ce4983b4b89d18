"""Parts of contexts put together and rounded to eight bits in one launch. A second launch would wait for the first, and
read again what it has written.

A program has all heads of a token, since they are one row of the product that follows.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.parts import Parts, combine_parts
from quire.ops.gpu.rounded_rows import reach_of
from quire.ops.gpu.tiles import MASKED, array, power_of_two, whole
from quire.ops.weights.rounded_rows import RoundedRows, nearest_codes, row_scale

NUM_WARPS = 16  # with fewer, contexts of many parts take longer, and others no less


def round_parts(
    out: jax.Array, counts: jax.Array, parts: Parts, code_dtype: Any, *, interpret: bool = False
) -> RoundedRows:
    """The rows of what `combine_parts` gives, [t, k * g * h]; all tokens have a count."""
    tokens, *heads, size = out.shape
    row, num_parts, queries = (tokens, prod(heads) * size), len(parts.outs), prod(heads)
    operands = [
        counts,
        parts.outs.reshape(num_parts, tokens, queries, size),
        parts.highest.reshape(num_parts, tokens, queries),
        parts.totals.reshape(num_parts, tokens, queries),
        out.reshape(tokens, queries, size),
    ]
    shapes = [array((tokens, queries, size), code_dtype), array((tokens,), jnp.float32)]
    codes, scales = pl.pallas_call(
        _round_parts,
        grid=(tokens,),
        in_specs=[pl.BlockSpec((None,), lambda token: (token,)), *map(whole, operands[1:])],
        out_specs=[whole(shape) for shape in shapes],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="round_parts",
    )(*operands)
    values = combine_parts(out, counts, parts, interpret=interpret)  # computed where they are read
    return RoundedRows(values.reshape(row), codes.reshape(row), scales[:, None])


def _round_parts(
    count_ref: Any, outs_ref: Any, highest_ref: Any, totals_ref: Any, out_ref: Any, codes_ref: Any, scales_ref: Any
) -> None:
    token, count = pl.program_id(0), count_ref[...]
    num_parts, _, queries, size = outs_ref.shape
    part, query, feature = (jnp.arange(power_of_two(most)) for most in (num_parts, queries, size))
    is_query = query < queries
    is_real = is_query[:, None] & (feature < size)[None, :]
    at = token, query[:, None], feature[None, :]
    alone = plgpu.load(out_ref.at[at], mask=is_real, other=0.0).astype(jnp.float32)  # asked for before it is known

    def together() -> jax.Array:
        there = (part < count)[:, None] & is_query[None, :]
        highest = plgpu.load(highest_ref.at[part[:, None], token, query[None, :]], mask=there, other=MASKED).max(axis=0)

        def add(number: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            sums, total = so_far
            exponent = plgpu.load(highest_ref.at[number, token, query], mask=is_query, other=MASKED)
            part_total = plgpu.load(totals_ref.at[number, token, query], mask=is_query, other=0.0)
            part_sums = plgpu.load(outs_ref.at[number, *at], mask=is_real, other=0.0)
            share = jnp.exp2(exponent - highest)
            return sums + share[:, None] * part_sums, total + share * part_total

        zeros = jnp.zeros(is_real.shape, jnp.float32), jnp.zeros(query.shape, jnp.float32)
        sums, total = jax.lax.fori_loop(0, count, add, zeros)
        return jnp.asarray(sums / jnp.maximum(total, 1e-30)[:, None])

    numbers = jax.lax.cond(count == 1, lambda: alone, together)
    numbers = jnp.where(is_real, numbers, 0.0).astype(out_ref.dtype).astype(jnp.float32)
    scale = row_scale(reach_of([numbers]), codes_ref.dtype)
    plgpu.store(codes_ref.at[at], nearest_codes(numbers * (1.0 / scale), codes_ref.dtype), mask=is_real)
    scales_ref[token] = scale
