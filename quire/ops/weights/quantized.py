"""Weights of eight bits, and their products with activations.

A weight is cut along its last axis into groups of 32 numbers, the last shorter where 32 does not divide the axis; a
group is int8 codes and one float32 scale. Activations are cut and quantised alike, row by row, when they meet a weight:
a group's product is an exact int32, and the sum over groups is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.native import int8_product
from quire.ops.native.int8_product import GROUP
from quire.ops.weights.coded import WIDENED_AT_ONCE, Axes, Coded, GroupedProduct, Parts
from quire.ops.weights.four_bit_experts import FourBitExperts
from quire.ops.weights.four_bits import FourBits
from quire.ops.weights.native_weight import NativeWeight
from quire.ops.weights.rounded_rows import BlockRows, RoundedRows, Rows, values

Array = np.ndarray[Any, Any]
LARGEST = 127
# Groups whose largest number is below this count as zero: the inverse of their scale would be infinite, or the scale
# itself too small for a normal float.
SMALLEST = 2.0**-119
_CHUNK_GROUPS = 1 << 15  # quantised at a time without the kernel, so that temporaries stay small


@partial(jax.tree_util.register_dataclass, data_fields=["tiles", "num_rows"], meta_fields=["shape", "num_contracted"])
@dataclass(frozen=True)
class Packed:
    """A weight in the order in which the kernel reads it, or the matrices of experts, each in that order."""

    tiles: Any  # int8, an array on the host or a device; those of experts have one axis more
    shape: tuple[int, ...]
    num_contracted: int  # of the last axes
    num_rows: Any = None  # int32 []: rows that products compute, the first; None: all


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Grouped:
    """A weight for XLA, cut across devices as it would be in float32."""

    codes: Any  # int8, of the weight's shape
    scales: Any  # float32 [..., groups]

    def of_experts(self) -> Coded:
        """The matrices [experts, ..., inputs] as those of a checkpoint, for rows that are rounded already."""
        return Coded(
            codes=self.codes,
            scales=self.scales,
            zeros=None,
            index=None,
            input_scale=None,
            input_zero=None,
            shape=self.codes.shape,
            num_contracted=1,
            is_of_experts=True,
            bits=8,
            group=GROUP,
        )


# Quantised here, or by a checkpoint. Parts may be quantised or not.
QuantizedWeight = Packed | Grouped | Coded | FourBits


def is_coded(node: object) -> bool:
    """True for the codes of a checkpoint, and for eight-bit ones on GPUs, in any order."""
    return isinstance(node, Coded | FourBits | FourBitExperts)


def gains_from_timings(node: object) -> bool:
    """True for codes whose products with many decodes a GPU's compiler should choose by timing them. The library's own
    choice is as good for e4m3; for int8 it takes up to a third longer."""
    return is_coded(node) and not (isinstance(node, Coded) and node.codes.dtype == jnp.float8_e4m3fn)


def quantized_row_bytes(size: int) -> int:
    """Bytes of `size` numbers along the last axis of a quantised weight."""
    return -(-size // GROUP) * (GROUP + 4)


def pack(weight: Array, num_contracted: int) -> Packed:
    """For one CPU with the kernel."""
    return Packed(int8_product.pack(weight, num_contracted), weight.shape, num_contracted)


def pack_experts(weight: Array) -> Packed:
    """The same for a matrix of each expert, [experts, ..., inputs]."""
    return Packed(int8_product.pack_matrices(weight), weight.shape, 1)


def group(weight: Array) -> Grouped:
    """For everything else."""
    *outer, size = weight.shape
    groups = -(-size // GROUP)
    rows = weight.reshape(-1, size)
    codes = np.empty(rows.shape, np.int8)
    scales = np.empty((len(rows), groups), np.float32)
    step = max(1, _CHUNK_GROUPS // groups)
    for start in range(0, len(rows), step):
        part = np.pad(rows[start : start + step].astype(np.float32), ((0, 0), (0, groups * GROUP - size)))
        part = part.reshape(-1, groups, GROUP)
        highest = np.abs(part).max(axis=-1, keepdims=True)
        highest[highest < SMALLEST] = 0.0
        inverse = np.divide(np.float32(LARGEST), highest, out=np.zeros_like(highest), where=highest > 0)
        found = np.rint(part * inverse).astype(np.int8).reshape(len(part), -1)
        codes[start : start + step] = found[:, :size]
        scales[start : start + step] = highest[..., 0] / np.float32(LARGEST)
    return Grouped(codes.reshape(weight.shape), scales.reshape(*outer, groups))


def pack_codes(codes: Array, scales: Array, num_contracted: int) -> Packed:
    """A weight that is whole groups already: codes int8 [..., groups, GROUP], their scales [..., groups]."""
    return Packed(int8_product.pack_codes(codes, scales, num_contracted), _shape_of_groups(scales), num_contracted)


def pack_expert_codes(codes: Array, scales: Array) -> Packed:
    """The same for the matrix of one expert, [1, ..., groups, GROUP]."""
    return Packed(int8_product.pack_codes(codes[0], scales[0], 1)[None], _shape_of_groups(scales), 1)


def group_codes(codes: Array, scales: Array) -> Grouped:
    """The same for everything else."""
    return Grouped(codes.copy().reshape(_shape_of_groups(scales)), scales.astype(np.float32))


def _shape_of_groups(scales: Array) -> tuple[int, ...]:
    return (*scales.shape[:-1], scales.shape[-1] * GROUP)


def shape_of(weight: "QuantizedWeight | Parts | NativeWeight | jax.Array") -> tuple[int, ...]:
    """The shape of the numbers it stands for."""
    return weight.codes.shape if isinstance(weight, Grouped) else weight.shape


def map_arrays(
    change: Callable[[Any, Axes], Any], weight: "QuantizedWeight | Parts | NativeWeight | Any", axes: Axes
) -> Any:
    """The weight, whose own axes are given, with change(array, its axes) for each array it consists of."""
    if isinstance(weight, Packed):  # for one device
        return Packed(change(weight.tiles, (None,) * weight.tiles.ndim), weight.shape, weight.num_contracted)
    if isinstance(weight, Grouped):
        return Grouped(change(weight.codes, axes), change(weight.scales, axes))
    if isinstance(weight, NativeWeight):
        return NativeWeight(change(weight.values, axes))
    if isinstance(weight, Coded | FourBits | FourBitExperts):
        return weight.map(change, axes)
    if isinstance(weight, Parts):
        parts = (map_arrays(change, part, (axes[0], axes[-1])) for part in weight.weights)
        return Parts(tuple(parts), change(weight.order, (None,)), weight.shape)
    return change(weight, axes)


def for_rows(weights: Any, num_rows: jax.Array) -> Any:
    """Weights whose products compute the first rows only, where kernels can: padding then costs next to nothing."""

    def can_skip(node: Any) -> bool:
        return isinstance(node, Packed | NativeWeight) or (isinstance(node, Coded) and node.is_native)

    return jax.tree.map(
        lambda node: replace(node, num_rows=num_rows) if can_skip(node) else node, weights, is_leaf=can_skip
    )


def product(x: Rows, weight: QuantizedWeight, num_output_axes: int, dtype: Any = jnp.float32) -> jax.Array:
    """float32 [t, outputs] of x [t, ...] with a weight whose first `num_output_axes` axes are outputs, flattened, for a
    caller that rounds it to `dtype`."""
    if isinstance(weight, Coded):
        return weight.product(x if isinstance(x, RoundedRows | BlockRows) else values(x).reshape(len(x), -1), dtype)
    if isinstance(weight, FourBits):
        return weight.product(values(x).reshape(len(x), -1))
    x, shape = values(x), shape_of(weight)
    width, inner = prod(shape[:num_output_axes]), shape[num_output_axes:]
    runs = x.reshape(len(x), -1, inner[-1])
    if isinstance(weight, Packed):
        assert weight.num_contracted == len(inner), f"a weight of {shape} was packed for {weight.num_contracted} inputs"
        return int8_product.product(runs, weight.tiles, width, weight.num_rows)
    near = rounded(runs).reshape(len(x), -1)
    return jnp.einsum("ti,oi->to", near, widened(weight).reshape(width, -1), preferred_element_type=jnp.float32)


def gated_product(both: jax.Array, weight: Packed) -> jax.Array:
    """float32 [t, outputs] of silu(both[:, 0]) * both[:, 1], both [t, 2, m], with a weight [outputs, m]."""
    return int8_product.product(both, weight.tiles, weight.shape[0], weight.num_rows, gated=True)


def grouped_product(
    x: jax.Array, weight: Packed | Grouped, sizes: jax.Array, multiply: GroupedProduct, at_once: int = WIDENED_AT_ONCE
) -> jax.Array:
    """float32 [n, outputs] of x [n, inputs] with each expert's matrix for the next of the `sizes` rows.

    Without the kernel, `multiply` gets float copies of as many experts as have `at_once` numbers.
    """
    if isinstance(weight, Packed):
        return int8_product.grouped_product(x, weight.tiles, sizes, prod(weight.shape[1:-1]))
    return weight.of_experts().grouped_product(rounded(x), sizes, multiply, at_once)


def gated_grouped_product(both: jax.Array, weight: Packed, sizes: jax.Array) -> jax.Array:
    """Like `grouped_product`, of silu(both[:, 0]) * both[:, 1], both [n, 2, inputs]."""
    return int8_product.grouped_product(both, weight.tiles, sizes, prod(weight.shape[1:-1]), gated=True)


def rows_of(weight: QuantizedWeight, indices: jax.Array) -> jax.Array:
    """float32 [n, size]: some rows [n] of a matrix."""
    if isinstance(weight, Coded | FourBits):
        return weight.rows(indices)
    if isinstance(weight, Grouped):
        return widened(Grouped(weight.codes[indices], weight.scales[indices]))
    found = int8_product.rows(weight.tiles, indices)
    return found.reshape(len(indices), -1)[:, : weight.shape[-1]]


def widened(weight: Grouped) -> jax.Array:
    """The float32 numbers it stands for."""
    size = weight.codes.shape[-1]
    scales = jnp.repeat(weight.scales, GROUP, axis=-1)[..., :size]
    wide: jax.Array = weight.codes.astype(jnp.float32) * scales
    return wide


def rounded(x: jax.Array) -> jax.Array:
    """Activations as they are once quantised, in float32: what the kernel computes with, up to its order of sums."""
    size = x.shape[-1]
    groups = -(-size // GROUP)
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, groups * GROUP - size)])
    parts = padded.reshape(*x.shape[:-1], groups, GROUP)
    highest = jnp.max(jnp.abs(parts), axis=-1, keepdims=True)
    highest = jnp.where(highest < SMALLEST, 0.0, highest)
    inverse = jnp.where(highest > 0, LARGEST / highest, 0.0)
    codes = jnp.round(parts * inverse)
    return (codes * (highest / LARGEST)).reshape(padded.shape)[..., :size]
