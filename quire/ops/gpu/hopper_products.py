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
from quire.ops.four_bits import FourBits
from quire.ops.gpu.mosaic import HAS_CODE_PRODUCT, HAS_MOSAIC
from quire.ops.rounded_rows import Activation, BlockRows, CodeProduct, RoundedRows, Rows

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
    out: jax.Array = module.code_product(rows, matrix, dtype, scales)
    return out


def has_blocks(num_rows: int, codes: jax.Array, num_contracted: int) -> bool:
    outputs, inputs = prod(codes.shape[:-num_contracted]), prod(codes.shape[-num_contracted:])
    if codes.dtype != jnp.float8_e4m3fn or (module := _few_rows()) is None:
        return False
    return module.blocks_of(num_rows, outputs, inputs) is not None


def multiply_four_bits(x: jax.Array, weight: FourBits, dtype: Any) -> jax.Array | None:
    """`FourBitProduct`."""
    if not HAS_MOSAIC or x.dtype.itemsize != 2:
        return None
    from quire.ops.gpu import few_rows

    return few_rows.sums(x, weight, dtype) if few_rows.fits(len(x), x.dtype, weight) else None


def gated_product(activation: Activation, x: Rows, gate_up: Any, down: Any) -> Rows | None:
    """`GatedProduct` of rows in codes of e4m3."""
    if not HAS_MOSAIC or activation is not jax.nn.silu or not (isinstance(gate_up, Coded) and isinstance(down, Coded)):
        return None
    code = jnp.float8_e4m3fn
    dtypes = {one.row_code_dtype(len(x), CODE_PRODUCT) for one in (gate_up, down)}
    if not isinstance(x, RoundedRows) or x.codes.dtype != code or dtypes != {jnp.dtype(code)} or x.dtype.itemsize != 2:
        return None
    from quire.ops.gpu import gated_codes

    if not gated_codes.fits(len(x), gate_up.shape[2], x.codes.shape[1], down.shape[0], x.dtype):
        return None
    rows: BlockRows = _gated(x, gate_up, x.dtype)
    return rows


@partial(jax.jit, static_argnums=2)
def _gated(x: RoundedRows, gate_up: Coded, dtype: Any) -> BlockRows:
    from quire.ops.gpu.gated_codes import gated_codes

    matrix, scales = gate_up.codes.reshape(-1, x.codes.shape[1]), gate_up.scales.reshape(-1).astype(jnp.float32)
    return BlockRows(*gated_codes(x.codes, x.scales, matrix, scales, dtype), dtype)


CODE_PRODUCT = CodeProduct(has_blocks, multiply_codes)
