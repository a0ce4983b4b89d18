"""Products of rows with codes of eight bits on GPUs: by a kernel where that is faster, else by XLA."""

from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.compute_capability import compute_capability

MOST_ROWS = 32  # of the kernel: with more the library's products of codes are faster


def kernel_rows(device: jax.Device) -> int:
    """Rows up to which the kernel multiplies on a device; 0: none. Its blocks were chosen for Hopper: GPUs before it
    do not convert e4m3, and some after it have less memory for blocks."""
    computes = compute_capability(device)
    return MOST_ROWS if computes is not None and 9.0 <= computes < 10.0 else 0


def widened_product(x: jax.Array, codes: jax.Array, scales: jax.Array, dtype: Any, kernel_rows: int) -> jax.Array:
    """[t, outputs] of x [t, inputs] as it is with codes [outputs, inputs], times scales [outputs]: float32, or `dtype`,
    which the caller rounds it to."""
    if _has_kernel(x, codes, kernel_rows) and x.dtype.itemsize == 2:
        from quire.ops.gpu.eight_bit_product import eight_bit_product  # not every JAX has its parts

        return eight_bit_product(x, codes, scales, dtype)
    out = jnp.einsum("ti,oi->to", x, codes.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.asarray(out * scales)


def code_product(rows: jax.Array, codes: jax.Array, dtype: Any, kernel_rows: int) -> jax.Array:
    """Sums [t, outputs] in `dtype` of rows that are codes [t, inputs]."""
    if _has_kernel(rows, codes, kernel_rows) and rows.dtype == codes.dtype:
        from quire.ops.gpu.eight_bit_product import eight_bit_product  # as above

        return eight_bit_product(rows, codes, None, dtype)
    return jnp.einsum("ti,oi->to", rows, codes, preferred_element_type=dtype)


def _has_kernel(rows: jax.Array, codes: jax.Array, kernel_rows: int) -> bool:
    return len(rows) <= kernel_rows and codes.dtype == jnp.float8_e4m3fn
