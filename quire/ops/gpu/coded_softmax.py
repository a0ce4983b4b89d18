"""A softmax under way over codes of eight bits, in products of float16, for the queries of one head.

Positions are the rows of its products, and queries their columns: a product has sixteen rows at least and eight
columns, and a head has few queries. Codes become float16 in one instruction, and bfloat16 in four.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from quire.ops.attention.spec import AttentionSpec
from quire.ops.gpu.tiles import MASKED, Block, Softmax, array, exponent_of_one, power_of_two

LEAST_COLUMNS = 8
ROOM = 2.0**15  # of a weight in float16: a weight is 1 at most, times a scale in parts of the largest so far
LARGEST_FLOAT16 = 65504.0


def in_float16(q: jax.Array) -> jax.Array:
    """Queries, cut at the largest there is; what is no number or infinite is none."""
    wide = q.astype(jnp.float32)
    cut = jnp.clip(wide, -LARGEST_FLOAT16, LARGEST_FLOAT16)
    return jnp.where(jnp.abs(wide) < jnp.inf, cut, jnp.nan).astype(jnp.float16)


def columns_of(queries: int) -> int:
    return max(LEAST_COLUMNS, power_of_two(queries))


def kept(codes: jax.Array, anything: jax.Array) -> jax.Array:
    """The same codes [s, h], of values. They are widened as they were loaded, sixteen side by side.

    Triton would move them as bytes, one by one, to where the product reads them, and widen them there. It does not move
    what depends on a number that it does not know, such as `anything`; this instruction costs nothing.
    """
    given: Any = {"args": [codes, jnp.broadcast_to(anything.astype(jnp.int8), codes.shape)], "pack": 4}
    like = [array(codes.shape, codes.dtype)]
    (same,) = plgpu.elementwise_inline_asm("mov.b32 $0, $1;", constraints="=r,r,r", result_shape_dtypes=like, **given)
    return same


class CodedSoftmax(NamedTuple):
    """Of queries [n], with sums [h, n] in parts of the largest scale of values so far."""

    highest: jax.Array
    total: jax.Array
    out: jax.Array
    largest: jax.Array

    @classmethod
    def begin(cls, empty: Softmax) -> "CodedSoftmax":
        """From a softmax that has added no block yet."""
        return cls(empty.highest, empty.total, jnp.zeros(empty.out.shape[::-1], jnp.float32), jnp.float32(0.0))

    def add(self, spec: AttentionSpec, q: jax.Array, block: Block, seen: jax.Array) -> "CodedSoftmax":
        """With the codes of a block, of which those weigh that are `seen` [s], as `Softmax.add`. Its bits depend on all
        positions that are loaded. `q` [n, h] is in float16."""
        assert block.key_scales is not None
        assert block.value_scales is not None
        scores = _product(block.keys.astype(q.dtype), q, (1, 1)) * block.key_scales.astype(jnp.float32)[:, None]
        if spec.softcap is not None:
            scores = jnp.tanh(scores * (spec.scale / spec.softcap))
        scores = jnp.where(jnp.broadcast_to(seen[:, None], scores.shape), scores, MASKED)
        unit = exponent_of_one(spec)
        highest = jnp.maximum(self.highest, scores.max(axis=0))
        weights = jnp.exp2(scores * unit - (jnp.where(highest > MASKED, highest, 0.0) * unit)[None, :])
        shrink = jnp.exp2((self.highest - highest) * unit)
        total = self.total * shrink + weights.sum(axis=0)
        value_scales = block.value_scales.astype(jnp.float32)
        largest = jnp.maximum(self.largest, value_scales.max())
        inverse = jnp.where(largest > 0.0, 1.0 / largest, 0.0)
        scaled = weights * (value_scales * (inverse * ROOM))[:, None]
        added = _product(block.values.astype(q.dtype), scaled.astype(q.dtype), (0, 0))
        out = self.out * (shrink * (self.largest * inverse))[None, :] + added
        return CodedSoftmax(highest, total, out, largest)

    def ended(self) -> Softmax:
        return Softmax(self.highest, self.total, self.out.T * (self.largest * (1.0 / ROOM)))


def _product(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    dimensions = ((axes[:1], axes[1:]), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
