"""Contexts that are read in parts, by several programs at a time, and put together afterwards.

A context that is read whole gives its result at once. Of others each part leaves a sum, and its weight in the softmax.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.tiles import MASKED, Softmax, array, exponent_of_one, power_of_two, whole


class Parts(NamedTuple):
    """The parts of the contexts of t tokens, n of each at most, with key heads k, queries g of each, features h."""

    outs: Any  # [n, t, k, g, h]
    highest: Any  # [n, t, k, g], as exponents of two
    totals: Any  # [n, t, k, g]

    @classmethod
    def shapes(cls, num_parts: int, q: jax.Array) -> "Parts":
        of_queries = array((num_parts, *q.shape[:-1]), jnp.float32)
        return cls(array((num_parts, *q.shape), jnp.float32), of_queries, of_queries)

    def store(self, spec: AttentionSpec, softmax: Softmax, at: tuple[Any, ...], mask: Any) -> None:
        """Within a kernel: part, tokens, head and queries `at`, [..., 1] each, and a mask [..., queries]."""
        rows, width = mask.shape, softmax.out.shape[-1]
        features = jnp.expand_dims(jnp.arange(width), range(len(rows)))  # of a `reshape`, Triton forgets the order
        plgpu.store(
            self.outs.at[(*(index[..., None] if index.ndim else index for index in at), features)],
            softmax.out.reshape(*rows, width),
            mask=mask[..., None] & (features < self.outs.shape[-1]),
        )
        plgpu.store(self.highest.at[at], (softmax.highest * exponent_of_one(spec)).reshape(rows), mask=mask)
        plgpu.store(self.totals.at[at], softmax.total.reshape(rows), mask=mask)


def combine_parts(out: jax.Array, counts: jax.Array, parts: Parts, *, interpret: bool = False) -> jax.Array:
    """`out` [t, k, g, h] with the contexts of the first tokens put together, whose numbers of parts are `counts`.

    A token with one part keeps its result. One with none becomes zero.
    """
    operands = [counts, *parts, out]
    result: jax.Array = pl.pallas_call(
        _combine,
        grid=(len(counts), out.shape[1]),
        in_specs=[pl.BlockSpec((None,), lambda token, head: (token,)), *map(whole, operands[1:])],
        out_specs=whole(out),
        out_shape=array(out.shape, out.dtype),
        input_output_aliases={len(operands) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=2 if len(parts.outs) <= 16 else 4, num_stages=1),
        interpret=interpret,
        name="combine_parts",
    )(*operands)
    return result


def _combine(count_ref: Any, outs_ref: Any, highest_ref: Any, totals_ref: Any, *out_refs: Any) -> None:
    out_ref = out_refs[-1]
    token, head, count = pl.program_id(0), pl.program_id(1), count_ref[...]
    num_parts, *_tokens_and_heads, group, size = outs_ref.shape
    part, query, feature = (jnp.arange(power_of_two(most)) for most in (num_parts, group, size))
    is_query, is_feature = query < group, feature < size

    @pl.when(count != 1)
    def _() -> None:
        there = (part < count)[:, None] & is_query[None, :]
        at = part[:, None], token, head, query[None, :]
        highest = plgpu.load(highest_ref.at[at], mask=there, other=MASKED)
        totals = plgpu.load(totals_ref.at[at], mask=there, other=0.0)
        whole_at = part[:, None, None], token, head, query[None, :, None], feature[None, None, :]
        outs = plgpu.load(outs_ref.at[whole_at], mask=there[:, :, None] & is_feature, other=0.0)
        share = jnp.exp2(highest - highest.max(axis=0)[None, :])
        total = (share * totals).sum(axis=0)
        result = (share[:, :, None] * outs).sum(axis=0) / jnp.maximum(total, 1e-30)[:, None]
        where = token, head, query[:, None], feature[None, :]
        real = is_query[:, None] & is_feature[None, :]
        plgpu.store(out_ref.at[where], result.astype(out_ref.dtype), mask=real)
