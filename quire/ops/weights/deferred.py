"""Work that a product leaves to its reader, which does it in one launch with work of its own.

A step of few rows reads its weights and does little else, so each launch between two products takes time for itself.
The product that a block ends with is therefore left to its reader (`PendingProduct`), which adds it to x and multiplies
it by the weight of a norm in the same launch. What the norm lacks then, the factor of each row, is applied by the
product that reads it (`NormalRows`). Outputs of experts are left to a norm that adds them up (`VisitSums`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@partial(jax.tree_util.register_dataclass, data_fields=["unscaled", "squares"], meta_fields=["eps"])
@dataclass(frozen=True)
class NormalRows:
    """Rows [t, inputs] times the weight of an RMS norm, without their factors: 1 / sqrt(mean of squares + eps)."""

    unscaled: jax.Array  # of the model's type
    squares: jax.Array  # float32 [parts, t]: sums of squares of the rows before the norm
    eps: float

    @property
    def dtype(self) -> Any:
        return self.unscaled.dtype

    def __len__(self) -> int:
        return len(self.unscaled)

    @property
    def factors(self) -> jax.Array:
        """float32 [t, 1]"""
        return jax.lax.rsqrt(self.squares.sum(axis=0)[:, None] / self.unscaled.shape[1] + self.eps)

    @property
    def values(self) -> jax.Array:
        return (self.unscaled.astype(jnp.float32) * self.factors).astype(self.dtype)


FewRowsIn = jax.Array | NormalRows


class FewRows(NamedTuple):
    """The kernels of a platform for few rows [t, inputs] and weights in codes."""

    fits: Callable[[int, Any, Any], bool]  # (number of rows, their type, weight)
    sums: Callable[[FewRowsIn, Any, Any], jax.Array]  # [t, outputs] of (rows, weight, type of the sums)
    # (rows, weight, x [t, outputs], weight of a norm, its eps and offset): x + product, rounded, and the norm of that.
    added: Callable[[FewRowsIn, Any, jax.Array, jax.Array, float, float], tuple[jax.Array, NormalRows]]


@partial(jax.tree_util.register_dataclass, data_fields=["rows", "weight"], meta_fields=["kernels"])
@dataclass(frozen=True)
class PendingProduct:
    """The product of few rows with a weight [outputs, *inputs], which its reader computes."""

    rows: FewRowsIn
    weight: Any
    kernels: FewRows

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    def __len__(self) -> int:
        return len(self.rows)

    def sums(self) -> jax.Array:
        """[t, outputs] in the type of the rows."""
        return self.kernels.sums(self.rows, self.weight, self.dtype)

    def added_to(self, x: jax.Array, weight: jax.Array, eps: float, offset: float) -> tuple[jax.Array, NormalRows]:
        """x and the product, and the RMS norm of that."""
        return self.kernels.added(self.rows, self.weight, x, weight, eps, offset)


@partial(jax.tree_util.register_dataclass, data_fields=["visits", "shares"], meta_fields=["dtype"])
@dataclass(frozen=True)
class VisitSums:
    """The sums over the experts of a token of their outputs, each times its share."""

    visits: jax.Array  # float32 [t, chosen, d]
    shares: jax.Array  # float32 [t, chosen]
    dtype: Any  # that the model rounds the sums to

    def __len__(self) -> int:
        return len(self.visits)

    def numbers(self) -> jax.Array:
        """float32 [t, d]"""
        return jnp.sum(self.visits * self.shares[:, :, None], axis=1)
