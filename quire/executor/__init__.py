"""How a plan becomes device work."""
