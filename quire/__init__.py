"""Quire serves large language models on JAX."""

__version__ = "0.1.0"
