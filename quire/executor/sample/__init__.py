"""Tokens drawn from logits."""
