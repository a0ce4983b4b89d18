"""Parts of sampling by the C++ kernels. A row's result does not depend on the other rows. The library must have been
loaded."""

import jax
import jax.numpy as jnp

from quire.ops.native.rows import counted


def highest(values: jax.Array, num_rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """For float32 values [r, v] the int32 places [r] of the highest, the first of equals, and the numbers there [r].
    Where there is a NaN, it counts as the highest. Both are 0 after the first `num_rows`."""
    rows = values.shape[0]
    shapes = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32)]  # type: ignore[no-untyped-call]
    places, numbers = jax.ffi.ffi_call("quire_highest", shapes)(values, counted(values, num_rows))
    return places, numbers


def filter_cuts(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, typical_p: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As in quire.ops.gpu.filter_cuts, for float32 on a CPU."""
    of_row = jax.ShapeDtypeStruct((logits.shape[0],), jnp.float32)  # type: ignore[no-untyped-call]
    whole = jax.ShapeDtypeStruct(logits.shape, logits.dtype)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("quire_filter_cuts", [whole, of_row, of_row, of_row], input_output_aliases={0: 0})
    same, cut, centre, spread = call(logits, top_k.astype(jnp.int32), top_p, -jnp.log(min_p), typical_p)
    return same, cut, centre, spread
