"""Kernels in Mosaic, for Hopper GPUs."""
