"""Settings of the cache folder: refused by name before anything starts."""

import os

import pytest

from quire.errors import InvalidSetting
from quire.server.processes.serve import serve
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.page_folder import FolderSettings
from tests.peers.test_refusals import GROUP


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache_folder_gib": 0.0}, "cache_folder_gib is 0.0; it must be above 0"),
        ({"cache_folder_gib": float("nan")}, "cache_folder_gib is nan"),
        ({"cache_folder_write_mib_s": -1.0}, "cache_folder_write_mib_s is -1.0; it must be above 0"),
        ({"cache_folder_gib": 8.0}, "cache_folder_gib is 8.0, and there is no folder: set cache_folder too"),
        ({"cache_folder_write_mib_s": 64.0}, "cache_folder_write_mib_s is 64.0, and there is no folder"),
    ],
)
def test_a_number_that_does_not_fit_is_named(changes, words):
    with pytest.raises(InvalidSetting) as refused:
        FolderSettings(**changes)
    assert words in str(refused.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_has_no_folder(tmp_path, rank):
    group = type(GROUP)(2, rank, GROUP.group_address, group_secret=GROUP.group_secret)
    with pytest.raises(InvalidSetting, match=r"^cache_folder is .*group_size"):
        serve(Config(), ServerSettings(), group, folder=FolderSettings(tmp_path / "pages"))


def test_a_folder_needs_prefix_caching(tmp_path):
    with pytest.raises(InvalidSetting, match=r"^cache_folder is .*prefix_caching"):
        serve(Config(prefix_caching=False), ServerSettings(), folder=FolderSettings(tmp_path / "pages"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "pages"):
        with pytest.raises(InvalidSetting, match=r"^cache_folder: .* cannot be made"):
            serve(Config(), ServerSettings(), folder=FolderSettings(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidSetting, match="cannot be read and written"):
        FolderSettings(tmp_path).check()


def test_a_folder_is_made_for_its_user_alone(tmp_path):
    FolderSettings(tmp_path / "a" / "pages").check()
    assert (tmp_path / "a" / "pages").stat().st_mode & 0o777 == 0o700
