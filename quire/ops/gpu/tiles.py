"""Parts that the attention kernels share. Triton's blocks have powers of two for sizes; what is over is masked."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.spec import AttentionSpec

LOG2_E = math.log2(math.e)
MASKED = -1e30  # below every score, yet finite, so that differences are numbers


def power_of_two(size: int) -> int:
    """The least that is not smaller."""
    return 1 << (size - 1).bit_length()


def least_dot(rows: int) -> int:
    """As many rows as a product of blocks must have at least."""
    return max(16, power_of_two(rows))


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def whole(operand: Any) -> pl.BlockSpec:
    """All of an array, for a kernel that finds its own place in it."""
    rank = len(operand.shape)
    return pl.BlockSpec(operand.shape, lambda *_: (0,) * rank)


class Block(NamedTuple):
    """Keys and values [s, h] of a head as they were loaded, with their scales [s] where they are codes."""

    keys: jax.Array
    values: jax.Array
    key_scales: jax.Array | None = None
    value_scales: jax.Array | None = None

    @classmethod
    def load(cls, refs: Any, where: tuple[Any, ...], seen: Any | None, features: Any | None) -> "Block":
        """From the arrays of `Pages`. `where`: pages and offsets as `where_is` gives them, the head, and the features.

        Positions [s] that are not `seen` are zero, and so are features [1, h] that are not there.
        """
        page, offset, head, _ = where
        there = None
        if seen is not None and features is not None:
            there = seen[:, None] & features
        keys, values = (load_masked(ref, where, there) for ref in refs[:2])
        if len(refs) == 2:
            return cls(keys, values)
        at = page if page.ndim == 0 else page.reshape(-1), head, offset.reshape(-1)
        return cls(keys, values, *(load_masked(ref, at, seen) for ref in refs[2:]))

    def weighted(self, weights: jax.Array, dtype: Any) -> jax.Array:
        """float32 [m, h] of weights [m, s]."""
        if self.value_scales is not None:
            weights = weights * self.value_scales.astype(jnp.float32)[None, :]
            # Small weights times small scales are 0 in float16; codes are exact in both.
            dtype = jnp.bfloat16 if dtype == jnp.float16 else dtype
        return product(weights.astype(dtype), self.values.astype(dtype), 0)


def load_masked(ref: Any, where: tuple[Any, ...], mask: Any | None) -> jax.Array:
    if mask is None:
        return ref[where]  # type: ignore[no-any-return]
    return plgpu.load(ref.at[where], mask=mask, other=0 if ref.dtype == jnp.int8 else 0.0)


class Softmax(NamedTuple):
    """A softmax under way over the rows of a tile, [m] and [m, h]."""

    highest: jax.Array  # of the scores so far
    total: jax.Array
    out: jax.Array

    @classmethod
    def begin(cls, rows: int, width: int, sinks: jax.Array | None = None) -> "Softmax":
        """`sinks` [rows] are first scores, without values; MASKED for none."""
        return cls(
            jnp.full(rows, MASKED, jnp.float32) if sinks is None else sinks,
            jnp.zeros(rows, jnp.float32) if sinks is None else (sinks > MASKED).astype(jnp.float32),
            jnp.zeros((rows, width), jnp.float32),
        )

    def add(self, spec: AttentionSpec, q: jax.Array, block: "Block", seen: jax.Array | None) -> "Softmax":
        """With the keys and values of a block, of which row i sees those where `seen` [m, s] says so.

        Keys that a row does not see weigh nothing, also where it has seen none yet: there scores are compared with 0,
        as the difference of two products that are fused may be anything.
        """
        scores = product(q, block.keys.astype(q.dtype), 1)
        if block.key_scales is not None:
            scores = scores * block.key_scales.astype(jnp.float32)[None, :]
        if spec.softcap is not None:
            scores = jnp.tanh(scores * (spec.scale / spec.softcap))
        if seen is not None:
            scores = jnp.where(seen, scores, MASKED)
        unit = exponent_of_one(spec)
        highest = jnp.maximum(self.highest, scores.max(axis=1))
        weights = jnp.exp2(scores * unit - (jnp.where(highest > MASKED, highest, 0.0) * unit)[:, None])
        shrink = jnp.exp2((self.highest - highest) * unit)
        total = self.total * shrink + weights.sum(axis=1)
        return Softmax(highest, total, self.out * shrink[:, None] + block.weighted(weights, q.dtype))

    def result(self) -> jax.Array:
        return self.out * (1.0 / jnp.maximum(self.total, 1e-30))[:, None]


def exponent_of_one(spec: AttentionSpec) -> float:
    """The power of two that a score of one stands for: the device has an instruction for those."""
    return (spec.scale if spec.softcap is None else spec.softcap) * LOG2_E


def load_sinks(spec: AttentionSpec, refs: Any, head: Any, query: jax.Array, is_first: Any) -> jax.Array | None:
    """The sinks of these queries in units of scores, for the part of a context that `is_first`; others have none."""
    if not spec.has_sinks:
        return None
    (ref,) = refs
    unit = spec.scale if spec.softcap is None else spec.softcap
    scores = plgpu.load(ref.at[head, query], mask=query < ref.shape[1], other=0.0).astype(jnp.float32) / unit
    return jnp.where((query < ref.shape[1]) & is_first, scores, MASKED)


def where_is(table_ref: Any, slot: Any, index: jax.Array, block: int, page_size: int, end: Any) -> tuple[Any, Any]:
    """Pages and offsets of a block's positions before `end`, [s, 1] each; one page for all where a block is in one."""
    at = index * block + jnp.arange(block)
    if page_size % block == 0:
        return table_ref[slot, index // (page_size // block)], (at % page_size)[:, None]
    pages = plgpu.load(table_ref.at[slot, at // page_size], mask=at < end, other=0)
    return pages[:, None], (at % page_size)[:, None]


def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Sums over the last axis of a [m, s] and the given one of b. float32 stays what it is, and is not rounded to ten
    bits as tensor cores would have it: float32 is asked for in order to compare."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=exact, preferred_element_type=jnp.float32)
