"""Products with the codes of quantised checkpoints by the C++ kernel, for CPUs. Its part for codes must have been
registered.

A row's result does not depend on the other rows.
"""

import jax
import jax.numpy as jnp
import numpy as np


def product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    index: jax.Array | None,
    *,
    group: int,
    scaled: bool = True,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """float32 [t, o] of x [t, i] with a matrix of the arrays of a `Coded` [o, ...]; `scaled` by its scales or not.

    With `sizes` [e], arrays [e, o, ...] have a matrix for each next run of so many rows.
    """
    outputs = codes.shape[-2]
    out = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)  # type: ignore[no-untyped-call]
    result: jax.Array = jax.ffi.ffi_call("quire_coded_product", out)(
        x,
        codes,
        scales,
        jnp.zeros(0, jnp.int8) if zeros is None else zeros,
        jnp.zeros(0, jnp.int32) if index is None else index,
        jnp.zeros(0, jnp.int32) if sizes is None else sizes.astype(jnp.int32),
        group=np.int64(group),
        scaled=scaled,
    )
    return result
