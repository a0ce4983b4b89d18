"""Float32 weights for the C++ kernels."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from quire.ops.native import float_product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeWeight:
    """A float32 weight on one CPU. The native library computes its products, one row like the next.

    An array of its own type, because the shape does not show which product a model was built for.
    """

    values: Any  # an array, on the host or a device
    num_rows: Any = None  # int32 []: rows that products compute, the first; None: all

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.values.shape
        return shape

    def product(self, x: jax.Array, num_output_axes: int) -> jax.Array:
        """[t, outputs] of x [t, inputs]; the first axes of the weight are outputs, the others inputs."""
        return float_product.product(x, self.values.reshape(prod(self.shape[:num_output_axes]), -1), self.num_rows)

    def grouped_product(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """[n, outputs] of x [n, inputs] with the matrices [e, ..., inputs], each for the next of the `sizes` rows."""
        num_matrices, inputs = self.shape[0], self.shape[-1]
        return float_product.grouped_product(x, self.values.reshape(num_matrices, -1, inputs), sizes)
