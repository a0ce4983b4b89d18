"""Norms between blocks: of a sum of x and what a block gives, as the reader of the norm takes it.

The output of a block is added to x by the norm after it. What of product, sum, norm and rounding is one launch is
decided here, by what the platform has.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from quire.ops.norms import Norms
from quire.ops.weights.deferred import NormalRows, PendingProduct, VisitSums
from quire.ops.weights.rounded_rows import BlockOutput, ProductKernels, RoundedRows, Rows, Sums, plain_sum, scaled
from quire.ops.weights.weight import Weight, code_dtype


class RowNorm(Protocol):
    """A norm with its weights."""

    def __call__(self, x: jax.Array, norms: Norms) -> jax.Array: ...

    def of_sum(self, x: jax.Array, out: BlockOutput, norms: Norms) -> tuple[jax.Array, jax.Array]:
        """x + out, and its norm."""

    def rounded_of_sum(
        self, x: jax.Array, out: Sums | None, norms: Norms, kernels: ProductKernels, code_dtype: Any
    ) -> tuple[jax.Array, RoundedRows]:
        """x + out, or x, and its norm, rounded to codes."""

    def of_product(self, x: jax.Array, out: PendingProduct) -> tuple[jax.Array, NormalRows] | None:
        """x + out, and its norm, whose rows their reader finishes; None where there is no such kernel."""


@dataclass(frozen=True)
class RMS:
    """Over the root mean square, times `offset + weight`."""

    weight: jax.Array
    eps: float
    offset: float

    def __call__(self, x: jax.Array, norms: Norms) -> jax.Array:
        return norms.rms(x, self.weight, self.eps, self.offset)

    def of_sum(self, x: jax.Array, out: BlockOutput, norms: Norms) -> tuple[jax.Array, jax.Array]:
        if isinstance(out, VisitSums) and norms.add_visits_rms is not None:
            return norms.add_visits_rms(x, out, self.weight, self.eps, self.offset)
        return norms.add_rms(x, scaled(out), self.weight, self.eps, self.offset)

    def rounded_of_sum(
        self, x: jax.Array, out: Sums | None, norms: Norms, kernels: ProductKernels, code_dtype: Any
    ) -> tuple[jax.Array, RoundedRows]:
        return kernels.add_rms(x, out, self.weight, self.eps, self.offset, code_dtype)

    def of_product(self, x: jax.Array, out: PendingProduct) -> tuple[jax.Array, NormalRows]:
        return out.added_to(x, self.weight, self.eps, self.offset)


@dataclass(frozen=True)
class MeanAndDeviation:
    """Less the mean, over the standard deviation, times the weight, plus the bias if there is one."""

    weight: jax.Array
    bias: jax.Array | None
    eps: float

    def __call__(self, x: jax.Array, norms: Norms) -> jax.Array:
        bias = jnp.zeros_like(self.weight) if self.bias is None else self.bias
        return norms.layer(x, self.weight, bias, self.eps)

    def of_sum(self, x: jax.Array, out: BlockOutput, norms: Norms) -> tuple[jax.Array, jax.Array]:
        total = x + scaled(out)
        return total, self(total, norms)

    def rounded_of_sum(
        self, x: jax.Array, out: Sums | None, norms: Norms, kernels: ProductKernels, code_dtype: Any
    ) -> tuple[jax.Array, RoundedRows]:
        total = plain_sum(x, out)
        return total, kernels.rows(self(total, norms), code_dtype)

    def of_product(self, x: jax.Array, out: PendingProduct) -> None:
        return None


def add_and_normalise(
    norm: RowNorm | None,
    x: jax.Array,
    out: BlockOutput | None,
    norms: Norms,
    kernels: ProductKernels,
    readers: Any = None,
    only_reader: Weight | None = None,
) -> tuple[jax.Array, Rows]:
    """x + out, and its norm where there is one, as the weights `readers` of the next block take it. `only_reader` is
    the one of them that alone reads the norm, if that is known."""
    codes = code_dtype(readers, len(x), kernels.product)
    if norm is None:
        x = x if out is None else x + scaled(out)
        return x, x if codes is None else kernels.rows(x, codes)
    if isinstance(out, PendingProduct):
        if codes is None and out.kernels.fits(len(x), x.dtype, only_reader):
            fused = norm.of_product(x, out)
            if fused is not None:
                return fused
        out = out.sums()
    if codes is not None:
        addend = scaled(out) if isinstance(out, VisitSums) else out
        return norm.rounded_of_sum(x, addend, norms, kernels, codes)
    return (x, norm(x, norms)) if out is None else norm.of_sum(x, out, norms)
