"""The chat for browsers."""
