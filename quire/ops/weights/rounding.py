"""Products that are rounded before they are added to something."""

import jax


def rounded(product: jax.Array) -> jax.Array:
    """The product as it is, for a sum. Else XLA may round product and sum once, or not, by the number of rows; on a CPU
    a row's numbers must not depend on that."""
    if jax.default_backend() != "cpu":
        return product
    kept: jax.Array = jax.lax.optimization_barrier(product)  # type: ignore[no-untyped-call]
    return kept
