"""Quantised checkpoints: one file for each way in which tools write them."""
