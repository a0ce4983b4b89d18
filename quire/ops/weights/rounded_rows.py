"""Rows of activations in eight bits, as products of codes take them, and the sums that such products give.

Rows are rounded where they are made, and sums are scaled where they are read. Either would be a pass over memory of its
own, and those together take a third of the time of the products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from quire.ops.norms import rms_norm
from quire.ops.weights.deferred import FewRows, NormalRows, PendingProduct, VisitSums

LARGEST_FLOAT8 = 448.0
HALF_OF_INT8 = 127.5  # of all its codes, -128 among them
EPSILON = 2.0**-23  # the scale of zeros
LEAST_SCALE = 2.0**-100  # its inverse is a number, too

Activation = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedRows:
    """Rows [t, inputs] with codes: each times its scale is nearly the values.

    Products with codes read codes, all else reads values. What nothing reads is not computed.
    """

    values: jax.Array  # of the model's type
    codes: jax.Array  # e4m3 or int8
    scales: jax.Array  # float32 [t, 1]

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.codes)


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["dtype"])
@dataclass(frozen=True)
class BlockRows:
    """Rows [t, inputs] that a product gave in codes, with a scale for each block of numbers of a row."""

    codes: jax.Array  # e4m3
    scales: jax.Array  # float32 [blocks, t]
    dtype: Any  # of the numbers

    @property
    def values(self) -> jax.Array:
        numbers = self.codes.astype(jnp.float32).reshape(*self.scales.T.shape, -1) * self.scales.T[:, :, None]
        return numbers.reshape(self.codes.shape).astype(self.dtype)

    def __len__(self) -> int:
        return len(self.codes)


@partial(jax.tree_util.register_dataclass, data_fields=["sums", "rows", "columns"], meta_fields=["dtype"])
@dataclass(frozen=True)
class ScaledSums:
    """The numbers sums * rows * columns, [t, *outputs]."""

    sums: jax.Array  # floats, or int32
    rows: jax.Array  # float32 [t, 1]
    columns: jax.Array  # float32 [outputs]
    dtype: Any  # that the model rounds the numbers to

    def __len__(self) -> int:
        return len(self.sums)

    def reshape(self, *outputs: int) -> "ScaledSums":
        return ScaledSums(self.sums.reshape(len(self), *outputs), self.rows, self.columns, self.dtype)

    def numbers(self) -> jax.Array:
        """In float32."""
        wide = self.sums.reshape(len(self), -1).astype(jnp.float32) * self.rows * self.columns
        return wide.reshape(self.sums.shape)


Rows = jax.Array | RoundedRows | BlockRows | NormalRows
Sums = jax.Array | ScaledSums
BlockOutput = Sums | VisitSums | PendingProduct


def values(rows: Rows) -> jax.Array:
    return rows.values if isinstance(rows, RoundedRows | BlockRows | NormalRows) else rows


def scaled(sums: BlockOutput) -> jax.Array:
    """The numbers in the model's type."""
    if isinstance(sums, PendingProduct):
        return sums.sums()
    return sums if isinstance(sums, jax.Array) else sums.numbers().astype(sums.dtype)


def row_reach(rows: jax.Array) -> jax.Array:
    """The largest size of the numbers in float32 rows [t, inputs], NaN where there is one: [t, 1]. By their bits, which
    are ordered as sizes are, NaN above all: XLA's maximum of floats drops NaN on CPUs."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(rows), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=1, keepdims=True), jnp.float32)


def row_scale(reach: jax.Array, code_dtype: Any) -> jax.Array:
    """The scale of a row whose numbers are `reach` at most; within kernels, too. A product: compilers make one of a
    division by a constant, or not, which gives another last bit."""
    most = HALF_OF_INT8 if code_dtype == jnp.int8 else LARGEST_FLOAT8
    scale = reach * (1.0 / most)
    return jnp.where(scale < LEAST_SCALE, EPSILON, scale)


def nearest_codes(numbers: jax.Array, code_dtype: Any) -> jax.Array:
    """Of float32 numbers that are divided by their scales; within kernels, too."""
    if code_dtype == jnp.int8:
        # Halves become even numbers. A Triton kernel has no `round`.
        above = jnp.clip(numbers, -128.0, 127.0) + 0.5
        whole = jnp.floor(above)
        is_odd = jnp.floor(whole * 0.5) * 2.0 != whole
        return jnp.where((whole == above) & is_odd, whole - 1.0, whole).astype(jnp.int8)
    return jnp.clip(numbers, -LARGEST_FLOAT8, LARGEST_FLOAT8).astype(code_dtype)


def round_rows(x: jax.Array, code_dtype: Any) -> RoundedRows:
    """Rows [t, inputs], each with a scale of its own. Rows are multiplied by inverses of scales, so that XLA makes one
    kernel of it."""
    rows = x.astype(jnp.float32)
    scales = row_scale(row_reach(rows), code_dtype)
    return RoundedRows(x, nearest_codes(rows * (1.0 / scales), code_dtype), scales)


def add_rms_norm(
    x: jax.Array, addend: Sums | None, weight: jax.Array, eps: float, offset: float, code_dtype: Any
) -> tuple[jax.Array, RoundedRows]:
    """x + addend, or x without one, and the rounded RMS norm of that sum."""
    total = plain_sum(x, addend)
    return total, round_rows(rms_norm(total, weight, eps, offset), code_dtype)


def plain_sum(x: jax.Array, addend: Sums | None) -> jax.Array:
    """x + addend, rounded once: sums that are scaled here are not rounded before."""
    if addend is None:
        return x
    if isinstance(addend, ScaledSums):
        return (x.astype(jnp.float32) + addend.numbers()).astype(x.dtype)
    return x + addend


def gated_values(activation: Activation, both: Sums) -> jax.Array:
    """activation(gate) * up of both [t, p, 2, m / p]: [t, m]."""
    numbers = both.numbers() if isinstance(both, ScaledSums) else both.astype(jnp.float32)
    active = activation(numbers[:, :, 0]) * numbers[:, :, 1]
    return active.astype(both.dtype).reshape(len(both), -1)


def gate(activation: Activation, both: Sums, code_dtype: Any) -> RoundedRows:
    """The rows that `gated_values` gives."""
    return round_rows(gated_values(activation, both), code_dtype)


class CodeProduct(NamedTuple):
    """A kernel for products of codes, where rows are so few that reading the matrix takes all the time."""

    fits: Callable[[int, jax.Array, int], bool]  # (number of rows, codes of the matrix, its axes of inputs)
    # (rows, matrix [outputs, inputs], type of the sums, scales of `BlockRows` or None)
    multiply: Callable[[jax.Array, jax.Array, Any, jax.Array | None], jax.Array]


class GatedProduct(Protocol):
    def __call__(self, activation: Activation, x: Rows, gate_up: Any, down: Any, /) -> Rows | None:
        """Rows activation(gate) * up for `down`, of the product of x with `gate_up` [1, 2, m, inputs]: in one launch.
        None where no kernel is for these."""


class ProductKernels(NamedTuple):
    """The products of a platform with codes, and the operations that make rounded rows for them, whose last argument is
    the type of codes. `product` is for codes of e4m3; `few_rows` for rows that are not rounded."""

    rows: Callable[[jax.Array, Any], RoundedRows] = round_rows
    # (x, addend, weight, eps, offset, code_dtype)
    add_rms: Callable[[jax.Array, Sums | None, jax.Array, float, float, Any], tuple[jax.Array, RoundedRows]] = (
        add_rms_norm
    )
    gate: Callable[[Activation, Sums, Any], RoundedRows] = gate
    product: CodeProduct | None = None
    few_rows: FewRows | None = None
    gated_product: GatedProduct | None = None


PLAIN = ProductKernels()
