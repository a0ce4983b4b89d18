"""Products with adapters by the C++ kernel, for CPUs. The library must have been loaded.

Rows of one adapter are multiplied together, and rows without one cost nothing. A row's result does not depend on the
other rows.
"""

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.native.library import need
from quire.ops.weights.adapters import JoinedStack, Stack
from quire.ops.weights.adapters import add_products as plain_add_products


def add_products(out: jax.Array, x: jax.Array, rows: jax.Array, stack: Stack, *, gated: bool = False) -> jax.Array:
    """An `AdapterProduct` for float32 on a CPU; adapters are float32 or bfloat16. `out` is changed in place."""
    if isinstance(stack, JoinedStack) or not need("adapters"):
        return plain_add_products(out.astype(jnp.float32), x.astype(jnp.float32), rows, stack, gated=gated)
    # Without axes: a reshape that keeps an axis of one tensor is a copy in every step.
    a, b = stack.a.reshape(-1), stack.b.reshape(-1)
    like = jax.ShapeDtypeStruct(out.shape, jnp.float32)  # type: ignore[no-untyped-call]
    call = jax.ffi.ffi_call("quire_adapter_product", like, input_output_aliases={0: 0})
    runs = np.array(stack.runs, np.int64).reshape(-1)
    result: jax.Array = call(
        out.astype(jnp.float32), x.astype(jnp.float32), rows, a, b, stack.ranks, runs=runs, gated=gated
    )
    return result
