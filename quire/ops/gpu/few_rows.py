"""Products of few rows with a matrix: as fast as the matrix is read.

Each program has some outputs and all inputs, so that the sums of a row are those that the library makes of more rows:
along the inputs, in order, sixteen at a time. The number of rows beside a row does not change its bits.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from quire.ops.gpu.tiles import array, least_dot, product, whole


class Tiling(NamedTuple):
    outputs: int  # of a program
    inputs: int  # read at a time
    num_warps: int
    num_stages: int  # blocks on their way at a time


# The fastest of eight over the matrices of an 8B model on an H200.
FEW, MORE, MOST = Tiling(32, 128, 4, 6), Tiling(32, 256, 4, 4), Tiling(64, 128, 4, 4)


def tiling_of(rows: int) -> Tiling:
    return FEW if rows <= 16 else MORE if rows <= 32 else MOST


def few_rows_product(
    x: jax.Array, matrix: jax.Array, dtype: Any, *, tiling: Tiling | None = None, interpret: bool = False
) -> jax.Array:
    """[t, outputs] in `dtype` of x [t, inputs] with a matrix [outputs, inputs], both of the same 16-bit type."""
    tiling = tiling or tiling_of(len(x))
    out = array((len(x), len(matrix)), dtype)
    found: jax.Array = pl.pallas_call(
        partial(_multiply, tiling),
        grid=(pl.cdiv(len(matrix), tiling.outputs),),
        in_specs=[whole(x), whole(matrix)],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=interpret,
        name="few_rows_product",
    )(x, matrix)
    return found


def _multiply(tiling: Tiling, x_ref: Any, matrix_ref: Any, out_ref: Any) -> None:
    (rows, inputs), outputs = x_ref.shape, matrix_ref.shape[0]
    row, output = jnp.arange(least_dot(rows)), pl.program_id(0) * tiling.outputs + jnp.arange(tiling.outputs)
    is_row, is_output = row < rows, output < outputs
    has_all_outputs, has_all_inputs = outputs % tiling.outputs == 0, inputs % tiling.inputs == 0

    def add(index: jax.Array, so_far: jax.Array) -> jax.Array:
        at = index * tiling.inputs + jnp.arange(tiling.inputs)
        is_input = (at < inputs)[None, :]
        x = plgpu.load(x_ref.at[row[:, None], at[None, :]], mask=is_row[:, None] & is_input, other=0.0)
        where = matrix_ref.at[output[:, None], at[None, :]]
        if has_all_outputs and has_all_inputs:
            return so_far + product(x, plgpu.load(where), 1)
        return so_far + product(x, plgpu.load(where, mask=is_output[:, None] & is_input, other=0.0), 1)

    begun = jnp.zeros((len(row), tiling.outputs), jnp.float32)
    sums = jax.lax.fori_loop(0, -(-inputs // tiling.inputs), add, begun)
    mask = is_row[:, None] & is_output[None, :]
    plgpu.store(out_ref.at[row[:, None], output[None, :]], sums.astype(out_ref.dtype), mask=mask)
