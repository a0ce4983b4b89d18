"""Guesses of the next tokens."""
