"""Requests and their streams, between the APIs and the engine."""
