"""Model files: where they come from and what is in them. No JAX; arrays are numpy's."""
