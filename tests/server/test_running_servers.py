"""The files by which `quire health` finds servers."""

import multiprocessing
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


def test_servers_that_start_at_once_do_not_remove_the_files_of_each_other(folder):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for listed in pool.map(_starts, [str(folder.parent)] * 2):
            assert all(listed)


def _starts(temporary: str) -> list[bool]:
    """Whether a server is listed, each of the times that it starts."""
    tempfile.tempdir = temporary
    listed = []
    for number in range(200):
        address = f"http://127.0.0.1:{os.getpid()}/{number}"
        with announced(address):
            listed.append(address in running_servers())
    return listed
