"""One file for each family of models."""
