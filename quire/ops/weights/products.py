"""Products of rows with weights as models ask for them. What of it is one launch is decided here.

Fused weights keep an axis for each idea, which an equation names: t tokens, d embed, k kv heads, g heads of a group, h
head size, m features. The contracted axes come last in both operands.
"""

from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.weights.deferred import FewRowsIn, NormalRows, PendingProduct
from quire.ops.weights.rounded_rows import (
    Activation,
    BlockOutput,
    BlockRows,
    ProductKernels,
    RoundedRows,
    Rows,
    Sums,
    gated_values,
    scaled,
)
from quire.ops.weights.weight import Weight, code_dtype, flat_rows


def matmul(x: Rows, weight: Weight, dtype: Any = jnp.float32) -> jax.Array:
    """[t, *outputs] of rows x [t, *inputs]: float32, or rounded to `dtype` if the product can."""
    return weight.product(x, dtype).reshape(len(x), *weight.outputs)


def project(equation: str, x: Rows, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """An einsum that accumulates in float32 whatever it is fed, and gives back the type of x."""
    _check(equation, weight)
    if bias is None:  # rounded by the product itself; a separate cast is another kernel on a GPU
        return matmul(x, weight, x.dtype).astype(x.dtype)
    return (matmul(x, weight) + bias.astype(jnp.float32)).astype(x.dtype)


def project_sums(equation: str, x: Rows, weight: Weight, bias: jax.Array | None, kernels: ProductKernels) -> Sums:
    """Like `project`, for a reader that applies scales itself where there are any."""
    of_sums = x.dtype if bias is None else jnp.float32  # a bias is added before they are rounded
    sums = None
    if (dtype := weight.row_code_dtype(len(x), kernels.product)) is not None:
        if not (isinstance(x, RoundedRows | BlockRows) and x.codes.dtype == dtype):
            x = kernels.rows(flat_rows(x), dtype)
        sums = weight.code_sums(x, of_sums, kernels.product)
    if sums is None:
        few = _by_few_rows(x, weight, bias, kernels)
        return project(equation, x, weight, bias) if few is None else few
    sums = sums.reshape(*weight.outputs)
    return sums if bias is None else (sums.numbers() + bias.astype(jnp.float32)).astype(x.dtype)


def block_output(
    equation: str, x: Rows, weight: Weight, bias: jax.Array | None, kernels: ProductKernels
) -> BlockOutput:
    """Like `project_sums` to the width of the model, for a reader that may compute the product itself."""
    few = kernels.few_rows
    if few is None or bias is not None or not few.fits(len(x), x.dtype, weight):
        return project_sums(equation, x, weight, bias, kernels)
    return PendingProduct(_few_rows_in(x), weight, few)


def gated_mlp(
    activation: Activation,
    x: Rows,
    gate_up: Weight,
    down: Weight,
    kernels: ProductKernels,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
) -> BlockOutput:
    """down(activation(gate(x)) * up(x)) of weights [p, 2, m / p, d] and [d, m]."""
    rows: Rows | None = None
    if gate_up_bias is None and gate_up.shape[0] == 1:
        rows = gate_up.gated_rows(activation, x)
        if rows is None and kernels.gated_product is not None:
            rows = kernels.gated_product(activation, x, gate_up, down)
    if rows is None:
        both = project_sums("td,pcmd->tpcm", x, gate_up, gate_up_bias, kernels)
        if (out := down.product_of_gated(activation, both)) is not None:
            return (out if down_bias is None else out + down_bias.astype(jnp.float32)).astype(x.dtype)
        dtype = code_dtype(down, len(x), kernels.product)
        rows = gated_values(activation, scaled(both)) if dtype is None else kernels.gate(activation, both, dtype)
    return block_output("tm,dm->td", rows, down, down_bias, kernels)


def rounded(product: jax.Array) -> jax.Array:
    """The product as it is, for a sum. Else XLA may round product and sum once, or not, by the number of rows; on a CPU
    a row's numbers must not depend on that."""
    if jax.default_backend() != "cpu":
        return product
    kept: jax.Array = jax.lax.optimization_barrier(product)  # type: ignore[no-untyped-call]
    return kept


def _by_few_rows(x: Rows, weight: Weight, bias: jax.Array | None, kernels: ProductKernels) -> jax.Array | None:
    """Like `project`, by the kernel for few rows, where there is one for these."""
    if kernels.few_rows is None:
        return None
    out = weight.few_row_product(_few_rows_in(x), kernels.few_rows, x.dtype if bias is None else jnp.float32)
    if out is None:
        return None
    out = out.reshape(len(x), *weight.outputs)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def _few_rows_in(x: Rows) -> FewRowsIn:
    return x if isinstance(x, NormalRows) else flat_rows(x)


def _check(equation: str, weight: Weight) -> None:
    x_axes, weight_axes, out_axes = equation.replace("->", ",").split(",")
    num_outputs = sum(axis in out_axes for axis in weight_axes)
    assert x_axes[1:] == weight_axes[num_outputs:], equation
    assert out_axes == x_axes[0] + weight_axes[:num_outputs], equation
    assert (len(weight_axes), num_outputs) == (len(weight.shape), len(weight.outputs)), f"{equation} of {weight.shape}"
