"""Architectures: what a family's weights are called and how one of its layers computes."""
