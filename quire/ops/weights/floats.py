"""Weights of floats, as they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.native import float_product
from quire.ops.weights.adapters import RoomyWeight
from quire.ops.weights.rounded_rows import Rows
from quire.ops.weights.weight import Axes, Weight, flat_rows, ragged_product


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["num_contracted"])
@dataclass(frozen=True)
class PlainWeight(Weight):
    """Floats that XLA multiplies."""

    values: Any  # an array, on the host or a device
    num_contracted: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.values.shape
        return shape

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        # Of two matrices: XLA's CPU backend is ten times slower on the same numbers in more dimensions.
        rows = flat_rows(x)
        return jnp.einsum("ti,oi->to", rows, self.values.reshape(-1, self.inputs), preferred_element_type=dtype)

    def rows(self, indices: jax.Array) -> jax.Array:
        found: jax.Array = self.values[indices]
        return found

    def grouped_product(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_product(x, self.values.reshape(len(self.values), -1, self.inputs), sizes)

    def product_by_head(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("tkgi,kgoi->tkgo", x, self.values, preferred_element_type=jnp.float32).astype(x.dtype)

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "PlainWeight":
        return replace(self, values=change(self.values, axes))

    def native(self) -> Weight:
        return NativeWeight(self.values, self.num_contracted) if self.values.dtype == jnp.float32 else self

    def with_room(self, num_rows: int, dtype: Any) -> Weight | None:
        if self.values.dtype != dtype:
            return None
        return RoomyWeight(_with_rows_below(self.values, prod(self.outputs), num_rows), self.shape, self.num_contracted)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "num_rows"], meta_fields=["num_contracted"])
@dataclass(frozen=True)
class NativeWeight(Weight):
    """Float32 on one CPU. The native library computes its products, one row like the next."""

    values: Any
    num_contracted: int = 1
    num_rows: Any = None  # int32 []: rows that products compute, the first; None: all

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.values.shape
        return shape

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        return float_product.product(flat_rows(x), self.values.reshape(-1, self.inputs), self.num_rows)

    def rows(self, indices: jax.Array) -> jax.Array:
        found: jax.Array = self.values[indices]
        return found

    def grouped_product(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return float_product.grouped_product(x, self.values.reshape(len(self.values), -1, self.inputs), sizes)

    def product_by_head(self, x: jax.Array) -> jax.Array:
        tokens, copies, group, inputs = x.shape
        rows = jnp.moveaxis(x, 0, 2).reshape(-1, inputs)
        matrices = self.values.reshape(copies * group, -1, inputs)
        out = float_product.grouped_product(rows, matrices, jnp.full(copies * group, tokens, jnp.int32))
        return jnp.moveaxis(out.reshape(copies, group, tokens, -1), 2, 0)

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "NativeWeight":
        return replace(self, values=change(self.values, axes))

    def for_rows(self, num_rows: jax.Array) -> "NativeWeight":
        return replace(self, num_rows=num_rows)


def _with_rows_below(weight: Any, outputs: int, added: int) -> Any:
    """The weight as a matrix with so many more rows; the weight is deleted."""
    if isinstance(weight, jax.ShapeDtypeStruct):
        shape = (outputs + added, prod(weight.shape) // outputs)
        return jax.ShapeDtypeStruct(shape, weight.dtype)  # type: ignore[no-untyped-call]
    wide = _padded(weight, outputs, added)
    weight.delete()
    return wide


@partial(jax.jit, static_argnums=(1, 2))
def _padded(weight: jax.Array, outputs: int, added: int) -> jax.Array:
    return jnp.pad(weight.reshape(outputs, -1), ((0, added), (0, 0)))
