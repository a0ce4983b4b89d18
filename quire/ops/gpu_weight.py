"""Weights of 16 bits for one GPU."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

FEW_ROWS = 64  # up to which our kernel is as fast as the library's products, or faster


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuWeight:
    """A weight whose products of few rows are our own kernel's, and others the library's. Both sum in the same order,
    and neither is chosen by timing it."""

    values: Any  # an array on the device

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.values.shape
        return shape

    def product(self, x: jax.Array, num_output_axes: int, dtype: Any) -> jax.Array:
        """[t, outputs] of x [t, inputs]; the first axes of the weight are outputs, the others inputs."""
        matrix = self.values.reshape(prod(self.shape[:num_output_axes]), -1)
        if len(x) > FEW_ROWS or x.dtype != matrix.dtype:
            return jnp.einsum("ti,oi->to", x, matrix, preferred_element_type=dtype)
        from quire.ops.gpu.few_rows import few_rows_product  # Pallas is there where a GPU is

        return few_rows_product(x, matrix, dtype)


def gpu_weight(weight: Any) -> Any:
    """The weight of a matrix for one GPU, if its type is one that the kernel multiplies."""
    return GpuWeight(weight) if weight.dtype in (jnp.bfloat16, jnp.float16) else weight
