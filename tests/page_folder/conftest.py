"""Engines that ask peers beside their folder."""

from tests.peers.conftest import _patient_connections  # noqa: F401
