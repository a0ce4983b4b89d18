"""Model files: finding them, fetching them, reading what they hold. No JAX here."""
