"""Text to tokens and back. No JAX."""
