"""The Anthropic API: messages and their tokens."""
