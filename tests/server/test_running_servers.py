"""The files by which `quire health` finds servers."""

import os
import tempfile
from pathlib import Path

import pytest

from quire.server.running_servers import announced, running_servers

ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"quire-servers-{os.getuid()}"


def test_a_server_is_listed_as_long_as_it_runs(folder):
    with announced(ADDRESS):
        assert running_servers() == [ADDRESS]
    assert running_servers() == []
    assert not list(folder.iterdir())


@pytest.mark.parametrize("kind", ["a link", "open to others"])
def test_nothing_is_written_through_links_that_others_can_have_made(folder, tmp_path, kind):
    """The temporary folder is everybody's, and another user may know the next process id."""
    made = tmp_path / "made" if kind == "a link" else folder
    made.mkdir()
    made.chmod(0o777)
    if made != folder:
        folder.symlink_to(made)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (made / f"{os.getpid()}.address").symlink_to(precious)
    with announced(ADDRESS):
        assert precious.read_text() == "kept"
        assert running_servers() == []
