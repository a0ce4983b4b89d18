"""Products with codes on Hopper GPUs: the kernels in Mosaic, and what they are for.

Loading Mosaic takes a third of a second, which only the weights pay that need it.
"""

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.weights.coded import Coded
from quire.ops.weights.deferred import FewRows, FewRowsIn, NormalRows
from quire.ops.weights.four_bits import FourBits
from quire.ops.weights.rounded_rows import Activation, BlockRows, CodeProduct, RoundedRows, Rows

CODE = jnp.float8_e4m3fn


@partial(jax.jit, static_argnums=2)
def multiply_codes(rows: jax.Array, matrix: jax.Array, dtype: Any, scales: jax.Array | None = None) -> jax.Array:
    from quire.ops.gpu.hopper.code_product import code_product

    out: jax.Array = code_product(rows, matrix, dtype, scales)
    return out


def has_blocks(num_rows: int, codes: jax.Array, num_contracted: int) -> bool:
    outputs, inputs = prod(codes.shape[:-num_contracted]), prod(codes.shape[-num_contracted:])
    if codes.dtype != CODE:
        return False
    from quire.ops.gpu.hopper.code_product import blocks_of

    return blocks_of(num_rows, outputs, inputs) is not None


def meets_few_rows(num_rows: int, dtype: Any, weight: Any) -> bool:
    """True if there is a kernel for so few rows of this type, which stay as they are."""
    if not isinstance(weight, FourBits | Coded):
        return False
    if isinstance(weight, Coded) and not weight.takes_rows_as_they_are(num_rows, CODE_PRODUCT):
        return False
    from quire.ops.gpu.hopper import few_rows

    return few_rows.fits(num_rows, dtype, weight)


def few_row_sums(rows: FewRowsIn, weight: Any, dtype: Any) -> jax.Array:
    from quire.ops.gpu.hopper import few_rows

    x, factor = _apart(rows)
    return few_rows.sums(x, weight, dtype, factor)


def few_rows_added(
    rows: FewRowsIn, weight: Any, x: jax.Array, norm_weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, NormalRows]:
    from quire.ops.gpu.hopper import few_rows

    own, factor = _apart(rows)
    total, unscaled, squares = few_rows.added(own, weight, x, norm_weight, offset, factor)
    return total, NormalRows(unscaled, squares, eps)


def _apart(rows: FewRowsIn) -> tuple[jax.Array, Any]:
    from quire.ops.gpu.hopper.few_rows import RowFactor

    return (rows.unscaled, RowFactor(rows.squares, rows.eps)) if isinstance(rows, NormalRows) else (rows, None)


def gated_product(activation: Activation, x: Rows, gate_up: Any, down: Any) -> Rows | None:
    """`GatedProduct` of few rows as they are, or of more in codes of e4m3."""
    if activation is not jax.nn.silu:
        return None
    if isinstance(x, RoundedRows):
        return _gated_codes(x, gate_up, down)
    if isinstance(x, BlockRows) or not meets_few_rows(len(x), x.dtype, gate_up):
        return None
    from quire.ops.gpu.hopper import few_rows

    own, factor = _apart(x)
    return few_rows.gated(own, gate_up, factor) if few_rows.fits(len(x), x.dtype, gate_up, is_gated=True) else None


def _gated_codes(x: RoundedRows, gate_up: Any, down: Any) -> BlockRows | jax.Array | None:
    """Codes of few rows, and numbers of more: their next product is faster with one scale of each row."""
    if not (isinstance(gate_up, Coded) and isinstance(down, Coded)):
        return None
    dtypes = {one.row_code_dtype(len(x), CODE_PRODUCT) for one in (gate_up, down)}
    if x.codes.dtype != CODE or dtypes != {jnp.dtype(CODE)} or x.dtype.itemsize != 2:
        return None
    from quire.ops.gpu.hopper import code_product, gated_codes, many_gates

    numbers, inputs = gate_up.shape[2], x.codes.shape[1]
    matrix, scales = gate_up.codes.reshape(-1, inputs), gate_up.scales.reshape(-1).astype(jnp.float32)
    if many_gates.gate_blocks_of(len(x), numbers, inputs) is not None:
        active: jax.Array = gate_many(x.codes, x.scales, matrix, scales, x.dtype)
        return active
    has_next = code_product.blocks_of(len(x), down.shape[0], numbers, has_scales=True) is not None
    if not has_next or gated_codes.gated_blocks_of(len(x), numbers, inputs, x.dtype) is None:
        return None
    codes, block_scales = gate_codes(x.codes, x.scales, matrix, scales, x.dtype)
    return BlockRows(codes, block_scales, x.dtype)


@partial(jax.jit, static_argnums=4)
def gate_codes(
    rows: jax.Array, row_scales: jax.Array, matrix: jax.Array, column_scales: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    from quire.ops.gpu.hopper.gated_codes import gated_codes

    return gated_codes(rows, row_scales, matrix, column_scales, dtype)


@partial(jax.jit, static_argnums=4)
def gate_many(
    rows: jax.Array, row_scales: jax.Array, matrix: jax.Array, column_scales: jax.Array, dtype: Any
) -> jax.Array:
    from quire.ops.gpu.hopper.many_gates import gated

    return gated(rows, row_scales, matrix, column_scales, dtype)


CODE_PRODUCT = CodeProduct(has_blocks, multiply_codes)
FEW_ROWS = FewRows(meets_few_rows, few_row_sums, few_rows_added)
