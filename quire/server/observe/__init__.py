"""Metrics, traces, logs and health."""
