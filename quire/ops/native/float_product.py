"""Products with float32 weights by the C++ kernel, for CPUs. The library must have been loaded.

A row's result does not depend on the other rows, which XLA's products do not promise.
"""

import jax
import jax.numpy as jnp

from quire.ops.native.library import need
from quire.ops.native.rows import counted
from quire.ops.weights.weight import ragged_product


def product(x: jax.Array, weight: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """[t, o] of x [t, i] with a weight [o, i]; only the first `num_rows` are to be read."""
    if not need("floats"):
        return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32)
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)  # type: ignore[no-untyped-call]
    result: jax.Array = jax.ffi.ffi_call("quire_float_product", out)(x, weight, counted(x, num_rows))
    return result


def grouped_product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """[n, o] of x [n, i] with, for each run of `sizes` rows, the next of the matrices [e, o, i]."""
    if not need("floats"):
        return ragged_product(x, weights, sizes)
    out = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.float32)  # type: ignore[no-untyped-call]
    result: jax.Array = jax.ffi.ffi_call("quire_float_grouped_product", out)(x, weights, sizes.astype(jnp.int32))
    return result
