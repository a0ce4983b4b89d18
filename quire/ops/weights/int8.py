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

from quire.ops.gates import SILU
from quire.ops.native import int8_product
from quire.ops.native.int8_product import GROUP
from quire.ops.weights.coded import WIDENED_AT_ONCE, Coded, GroupedProduct
from quire.ops.weights.rounded_rows import Activation, Rows, Sums, scaled, values
from quire.ops.weights.weight import Axes, Weight, ragged_product

Array = np.ndarray[Any, Any]
LARGEST = 127
# Groups whose largest number is below this count as zero: the inverse of their scale would be infinite, or the scale
# itself too small for a normal float.
SMALLEST = 2.0**-119
_CHUNK_GROUPS = 1 << 15  # quantised at a time without the kernel, so that temporaries stay small


@partial(jax.tree_util.register_dataclass, data_fields=["tiles", "num_rows"], meta_fields=["shape", "num_contracted"])
@dataclass(frozen=True)
class Packed(Weight):
    """A weight in the order in which the kernel reads it, or the matrices of experts, each in that order."""

    tiles: Any  # int8, an array on the host or a device; those of experts have one axis more
    shape: tuple[int, ...]
    num_contracted: int  # of the last axes
    num_rows: Any = None  # int32 []: rows that products compute, the first; None: all

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        return int8_product.product(_runs(x, self.shape), self.tiles, prod(self.outputs), self.num_rows)

    def product_of_gated(self, activation: Activation, both: Sums) -> jax.Array | None:
        """One kernel gates, quantises and multiplies."""
        if activation is not jax.nn.silu:
            return None
        return int8_product.product(scaled(both)[:, 0], self.tiles, self.shape[0], self.num_rows, gated=True)

    def grouped_product(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return int8_product.grouped_product(x, self.tiles, sizes, prod(self.shape[1:-1]))

    def grouped_product_of_gated(self, gate: Any, both: jax.Array, sizes: jax.Array) -> jax.Array | None:
        if gate != SILU:
            return None
        return int8_product.grouped_product(both[:, 0], self.tiles, sizes, prod(self.shape[1:-1]), gated=True)

    def rows(self, indices: jax.Array) -> jax.Array:
        found = int8_product.rows(self.tiles, indices)
        return found.reshape(len(indices), -1)[:, : self.shape[-1]]

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "Packed":
        """Its tiles are on one device."""
        return replace(self, tiles=change(self.tiles, (None,) * self.tiles.ndim))

    def for_shape(self, shape: tuple[int, ...]) -> "Packed":
        return replace(self, shape=shape)

    def for_rows(self, num_rows: jax.Array) -> "Packed":
        return replace(self, num_rows=num_rows)


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["num_contracted"])
@dataclass(frozen=True)
class Grouped(Weight):
    """A weight for XLA, cut across devices as it would be in float32."""

    codes: Any  # int8, of the weight's shape
    scales: Any  # float32 [..., groups]
    num_contracted: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.codes.shape
        return shape

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        near = rounded(_runs(x, self.shape)).reshape(len(x), -1)
        matrix = self.widened().reshape(prod(self.outputs), -1)
        return jnp.einsum("ti,oi->to", near, matrix, preferred_element_type=jnp.float32)

    def grouped_product(
        self,
        x: jax.Array,
        sizes: jax.Array,
        multiply: GroupedProduct = ragged_product,
        at_once: int = WIDENED_AT_ONCE,
    ) -> jax.Array:
        """`multiply` gets float copies of as many experts as have `at_once` numbers."""
        return self._of_experts().grouped_product(rounded(x), sizes, multiply, at_once)

    def rows(self, indices: jax.Array) -> jax.Array:
        return Grouped(self.codes[indices], self.scales[indices]).widened()

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "Grouped":
        return replace(self, codes=change(self.codes, axes), scales=change(self.scales, axes))

    def widened(self) -> jax.Array:
        """The float32 numbers it stands for."""
        scales = jnp.repeat(self.scales, GROUP, axis=-1)[..., : self.shape[-1]]
        wide: jax.Array = self.codes.astype(jnp.float32) * scales
        return wide

    def _of_experts(self) -> Coded:
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


def _runs(x: Rows, shape: tuple[int, ...]) -> jax.Array:
    """The numbers of rows [t, runs, run] that groups are cut from: along the last axis of a weight."""
    rows = values(x)
    return rows.reshape(len(rows), -1, shape[-1])


def quantized_row_bytes(size: int) -> int:
    """Bytes of `size` numbers along the last axis of a quantised weight."""
    return -(-size // GROUP) * (GROUP + 4)


def pack(weight: Array, num_contracted: int) -> Packed:
    """For one CPU with the kernel."""
    return Packed(int8_product.pack(weight, num_contracted), weight.shape, num_contracted)


def pack_experts(weight: Array) -> Packed:
    """The same for a matrix of each expert, [experts, ..., inputs]."""
    return Packed(int8_product.pack_matrices(weight), weight.shape, 1)


def group(weight: Array, num_contracted: int = 1) -> Grouped:
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
    return Grouped(codes.reshape(weight.shape), scales.reshape(*outer, groups), num_contracted)


def pack_codes(codes: Array, scales: Array, num_contracted: int) -> Packed:
    """A weight that is whole groups already: codes int8 [..., groups, GROUP], their scales [..., groups]."""
    return Packed(int8_product.pack_codes(codes, scales, num_contracted), _shape_of_groups(scales), num_contracted)


def pack_expert_codes(codes: Array, scales: Array) -> Packed:
    """The same for the matrix of one expert, [1, ..., groups, GROUP]."""
    return Packed(int8_product.pack_codes(codes[0], scales[0], 1)[None], _shape_of_groups(scales), 1)


def group_codes(codes: Array, scales: Array, num_contracted: int = 1) -> Grouped:
    """The same for everything else."""
    return Grouped(codes.copy().reshape(_shape_of_groups(scales)), scales.astype(np.float32), num_contracted)


def _shape_of_groups(scales: Array) -> tuple[int, ...]:
    return (*scales.shape[:-1], scales.shape[-1] * GROUP)


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
