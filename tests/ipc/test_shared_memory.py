"""Memory that processes share does not depend on a disk that others fill."""

import mmap
import os
import sys
import tempfile
from pathlib import Path

import pytest

from quire.ipc.journal import Journal, Record
from quire.ipc.shared_memory import new_memory
from quire.server.api_keys import ApiKey
from quire.server.rate_limits import RateLimits


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a file")
def test_neither_the_journal_nor_the_limits_of_keys_are_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes would be ended by SIGBUS once it is full."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    journal = Journal()
    journal.write(Record([5, 6]))
    assert journal.read() == Record([5, 6])
    limits = RateLimits([ApiKey("ann", b"a", requests_per_minute=2)], clock=lambda: 0.0)
    limits.admit_request("ann")
    assert limits.headers("ann")["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_it_is_zeros_of_any_length_without_a_name(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = new_memory(10_000)
    with mmap.mmap(file, 10_000) as memory:
        assert memory[:] == bytes(10_000)
    assert not list(tmp_path.iterdir())
    os.close(file)
