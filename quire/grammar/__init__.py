"""Grammars that answers follow: their limits, the check before use, and the matcher."""
