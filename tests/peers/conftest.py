"""Peers in this process are as patient as tests."""

import pytest

from quire.peers import page_client
from tests.patience import WAIT_S


@pytest.fixture(autouse=True)
def _patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes its time for a handshake, and for the next word of a peer that computes."""
    monkeypatch.setattr(page_client, "CONNECT_S", WAIT_S)
    monkeypatch.setattr(page_client, "SILENCE_S", WAIT_S)
