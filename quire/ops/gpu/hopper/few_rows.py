"""Products of few rows with matrices in codes of four or eight bits on Hopper GPUs, fused with what follows each.

So a layer of decodes has few launches: norms, gates and sums have none of their own. The rows of a norm come without
the factor of each row (`RowFactor`), as `added` gives them.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.gpu.hopper import few_row_blocks
from quire.ops.gpu.hopper.eight_bit_fragments import EightBitSteps
from quire.ops.gpu.hopper.few_row_blocks import EIGHT_BIT_STEP, RowBlocks
from quire.ops.gpu.hopper.few_row_kernel import Plan, Steps, few_row_product
from quire.ops.gpu.hopper.four_bit_fragments import FourBitSteps
from quire.ops.gpu.hopper.row_epilogues import Add, Epilogue, Gate, Sum
from quire.ops.gpu.hopper.row_factors import Squares
from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bits import TILE, FourBits

EIGHT_BIT_CODES = jnp.float8_e4m3fn, jnp.int8
Weight = FourBits | Coded


class RowFactor(NamedTuple):
    """The factors of a norm, still to be applied to its rows: 1 / sqrt(mean of squares + eps)."""

    squares: jax.Array  # float32 [parts, rows]: sums
    eps: float


def fits(num_rows: int, dtype: Any, weight: Weight, *, is_gated: bool = False) -> bool:
    """True if the kernel multiplies such rows with this weight. `is_gated`: the outputs are gates and ups."""
    return blocks_of(num_rows, dtype, weight, 2 if is_gated else 1) is not None


def blocks_of(num_rows: int, dtype: Any, weight: Weight, pieces: int = 1) -> RowBlocks | None:
    """None where the kernel does not apply."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16) or num_rows < 1:
        return None
    outputs, inputs = _sizes(weight)
    if isinstance(weight, FourBits):
        return few_row_blocks.of_four_bits(num_rows, outputs, inputs, weight.group, weight.run, pieces)
    return few_row_blocks.of_eight_bits(num_rows, outputs, inputs, pieces) if _is_plain(weight) else None


def sums(x: jax.Array, weight: Weight, dtype: Any, factor: RowFactor | None = None) -> jax.Array:
    """[t, outputs] in `dtype` of x [t, inputs]."""
    return product(x, weight, Sum(jnp.dtype(dtype)), factor)[0]


def gated(x: jax.Array, weight: Weight, factor: RowFactor | None = None) -> jax.Array:
    """silu(gates) * ups [t, m] of a matrix with all m gates first, then all ups."""
    return product(x, weight, Gate(x.dtype), factor)[0]


def added(
    x: jax.Array,
    weight: Weight,
    residual: jax.Array,
    norm_weight: jax.Array,
    offset: float,
    factor: RowFactor | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """residual + product, rounded, [t, outputs]; that times (norm_weight + offset), rounded, which are the rows of the
    next product; and the squares of their `RowFactor`."""
    epilogue = Add(residual.dtype, norm_weight.dtype, offset)
    total, normal, squares = product(x, weight, epilogue, factor, residual, norm_weight)
    return total, normal, squares


def product(
    x: jax.Array,
    weight: Weight,
    epilogue: Epilogue,
    factor: RowFactor | None = None,
    *given: jax.Array,
    blocks: RowBlocks | None = None,
) -> tuple[jax.Array, ...]:
    """The results of an epilogue. `given`: its inputs."""
    blocks = blocks or blocks_of(len(x), x.dtype, weight, epilogue.pieces)
    assert blocks is not None, "the kernel is not for this product"
    squares, eps = (None, 0.0) if factor is None else factor
    out: tuple[jax.Array, ...] = _product(x, weight, squares, given, blocks, epilogue, eps)
    return out


@partial(jax.jit, static_argnums=(4, 5, 6))  # layers that are alike are traced once
def _product(
    x: jax.Array,
    weight: Weight,
    squares: jax.Array | None,
    given: tuple[jax.Array, ...],
    blocks: RowBlocks,
    epilogue: Epilogue,
    eps: float,
) -> tuple[jax.Array, ...]:
    steps: Steps
    outputs, inputs = _sizes(weight)
    pieces = epilogue.pieces
    if isinstance(weight, FourBits):
        steps = FourBitSteps(
            weight.run, weight.group, blocks.steps, blocks.outputs, pieces, x.dtype, weight.scale_dtype
        )
        codes = weight.codes.reshape(pieces, outputs // pieces // TILE, -1, weight.run)
        arrays = codes, weight.factors.reshape(-1, pieces, outputs // pieces)
    else:
        steps = EightBitSteps(blocks.steps * EIGHT_BIT_STEP, blocks.outputs, pieces, x.dtype, weight.codes.dtype)
        codes = weight.codes.reshape(pieces, outputs // pieces, inputs)
        arrays = codes, weight.scales.reshape(pieces, outputs // pieces)
    of_rows = None if squares is None else Squares(len(squares), len(x), inputs, eps)
    more = given if squares is None else (squares, *given)
    return few_row_product(x, arrays, outputs, Plan(blocks, steps, epilogue, of_rows, 2, len(given)), *more)


def _sizes(weight: Weight) -> tuple[int, int]:
    """Outputs and inputs."""
    at = len(weight.shape) - weight.num_contracted
    return prod(weight.shape[:at]), prod(weight.shape[at:])


def _is_plain(weight: Coded) -> bool:
    """True for codes of eight bits with a scale of each output and nothing else."""
    is_whole = weight.scales.shape[-1] == 1 and weight.zeros is None and weight.index is None
    has_codes = weight.bits == 8 and weight.codes.dtype in EIGHT_BIT_CODES and not weight.is_of_experts
    is_scaled = weight.output_scales is None and weight.scales.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return is_whole and has_codes and is_scaled
