"""Products with codes on Hopper GPUs: the kernels in Mosaic, and what they are for.

Loading Mosaic takes a third of a second, which only the weights pay that need it.
"""

import logging
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.coded import Coded
from quire.ops.few_rows import FewRows, FewRowsIn, NormalRows
from quire.ops.four_bits import FourBits
from quire.ops.gpu.mosaic import HAS_CODE_PRODUCT, HAS_MOSAIC
from quire.ops.rounded_rows import Activation, BlockRows, CodeProduct, RoundedRows, Rows

CODE = jnp.float8_e4m3fn
log = logging.getLogger(__name__)


@cache
def _few_rows() -> Any | None:
    """The module of products with few rows in e4m3."""
    if not HAS_CODE_PRODUCT:
        return None
    try:
        from quire.ops.gpu import code_product
    except ImportError as error:  # before 0.11 JAX has it with absl-py
        log.info("this JAX has no products of few rows in e4m3 (%s): XLA's run in their place", error)
        return None
    return code_product


@partial(jax.jit, static_argnums=2)
def multiply_codes(rows: jax.Array, matrix: jax.Array, dtype: Any, scales: jax.Array | None = None) -> jax.Array:
    module = _few_rows()
    assert module is not None
    if scales is not None and len(rows) > module.MOST_ROWS:
        from quire.ops.gpu.many_scaled_product import many_scaled_product

        return many_scaled_product(rows, matrix, dtype, scales)
    out: jax.Array = module.code_product(rows, matrix, dtype, scales)
    return out


def has_blocks(num_rows: int, codes: jax.Array, num_contracted: int) -> bool:
    outputs, inputs = prod(codes.shape[:-num_contracted]), prod(codes.shape[-num_contracted:])
    if codes.dtype != CODE or (module := _few_rows()) is None:
        return False
    return module.blocks_of(num_rows, outputs, inputs) is not None


def meets_few_rows(num_rows: int, dtype: Any, weight: Any) -> bool:
    """True if there is a kernel for so few rows of this type, which stay as they are."""
    if not HAS_MOSAIC or not isinstance(weight, FourBits | Coded):
        return False
    if isinstance(weight, Coded) and not weight.takes_rows_as_they_are(num_rows, CODE_PRODUCT):
        return False
    from quire.ops.gpu import few_rows

    return few_rows.fits(num_rows, dtype, weight)


def few_row_sums(rows: FewRowsIn, weight: Any, dtype: Any) -> jax.Array:
    from quire.ops.gpu import few_rows

    x, factor = _apart(rows)
    return few_rows.sums(x, weight, dtype, factor)


def few_rows_added(
    rows: FewRowsIn, weight: Any, x: jax.Array, norm_weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, NormalRows]:
    from quire.ops.gpu import few_rows

    own, factor = _apart(rows)
    total, unscaled, squares = few_rows.added(own, weight, x, norm_weight, offset, factor)
    return total, NormalRows(unscaled, squares, eps)


def _apart(rows: FewRowsIn) -> tuple[jax.Array, Any]:
    from quire.ops.gpu.few_rows import RowFactor

    return (rows.unscaled, RowFactor(rows.squares, rows.eps)) if isinstance(rows, NormalRows) else (rows, None)


def gated_product(activation: Activation, x: Rows, gate_up: Any, down: Any) -> Rows | None:
    """`GatedProduct` of few rows as they are, or of more in codes of e4m3."""
    if not HAS_MOSAIC or activation is not jax.nn.silu:
        return None
    if isinstance(x, RoundedRows):
        return _gated_codes(x, gate_up, down)
    if isinstance(x, BlockRows) or not meets_few_rows(len(x), x.dtype, gate_up):
        return None
    from quire.ops.gpu import few_rows

    own, factor = _apart(x)
    return few_rows.gated(own, gate_up, factor) if few_rows.fits(len(x), x.dtype, gate_up, is_gated=True) else None


def _gated_codes(x: RoundedRows, gate_up: Any, down: Any) -> BlockRows | None:
    if not (isinstance(gate_up, Coded) and isinstance(down, Coded)):
        return None
    dtypes = {one.row_code_dtype(len(x), CODE_PRODUCT) for one in (gate_up, down)}
    if x.codes.dtype != CODE or dtypes != {jnp.dtype(CODE)} or x.dtype.itemsize != 2:
        return None
    if not has_gates(len(x), gate_up.shape[2], x.codes.shape[1], down.shape[0], x.dtype):
        return None
    matrix, scales = gate_up.codes.reshape(-1, x.codes.shape[1]), gate_up.scales.reshape(-1).astype(jnp.float32)
    codes, block_scales = gate_codes(x.codes, x.scales, matrix, scales, x.dtype)
    return BlockRows(codes, block_scales, x.dtype)


def has_gates(num_rows: int, numbers: int, inputs: int, outputs: int, dtype: Any) -> bool:
    """True if there are kernels for `numbers` gates of `inputs` and for the product of them with the next matrix."""
    from quire.ops.gpu import code_product, gated_codes, many_gated_codes, many_scaled_product

    if num_rows <= code_product.MOST_ROWS:
        gates = gated_codes.gated_blocks_of(num_rows, numbers, inputs, dtype)
        return gates is not None and code_product.blocks_of(num_rows, outputs, numbers, has_scales=True) is not None
    if many_gated_codes.many_gated_blocks_of(num_rows, numbers, inputs, dtype) is None:
        return False
    return many_scaled_product.scaled_blocks_of(num_rows, outputs, numbers) is not None


@partial(jax.jit, static_argnums=4)
def gate_codes(
    rows: jax.Array, row_scales: jax.Array, matrix: jax.Array, column_scales: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of `BlockRows`; see quire.ops.gpu.gated_codes."""
    from quire.ops.gpu import code_product, gated_codes, many_gated_codes

    is_few = len(rows) <= code_product.MOST_ROWS
    run = gated_codes.gated_codes if is_few else many_gated_codes.many_gated_codes
    return run(rows, row_scales, matrix, column_scales, dtype)


CODE_PRODUCT = CodeProduct(has_blocks, multiply_codes)
FEW_ROWS = FewRows(meets_few_rows, few_row_sums, few_rows_added)
