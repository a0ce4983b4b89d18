"""Products of runs of rows, each with its own matrix, by XLA."""

import jax
import jax.numpy as jnp


def ragged_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """float32 [n, o] of x [n, i] with, for each run of `sizes` rows, the next of the matrices [e, o, i]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(
        x, matrices, sizes.astype(jnp.int32), dimensions, preferred_element_type=jnp.float32
    )
