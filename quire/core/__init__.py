"""Chooses the tokens that each step computes. Standard library only."""
