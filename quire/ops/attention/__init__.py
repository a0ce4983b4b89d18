"""Attention, and what it needs of heads and positions."""
