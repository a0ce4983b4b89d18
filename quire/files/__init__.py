"""Model files: finding, fetching and reading them. No JAX here."""
