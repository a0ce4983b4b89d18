"""Device operations, each with a plain-jnp reference."""
