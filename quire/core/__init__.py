"""Which tokens each step computes. Standard library only."""
