"""The folder that everything kept between starts is in."""

from pathlib import Path

import pytest

from quire.errors import InvalidSetting, ModelUnavailable
from quire.files.cache_folder import cache_folder
from quire.files.model_files import locate


def test_a_folder_can_be_given_as_text(tmp_path: Path) -> None:
    assert cache_folder(str(tmp_path)) == cache_folder(tmp_path) == tmp_path


def test_the_home_of_an_unknown_user_is_refused_by_name() -> None:
    with pytest.raises(InvalidSetting, match="cache_dir = '~no-such-user/cache'"):
        cache_folder("~no-such-user/cache")
    with pytest.raises(ModelUnavailable, match="'~no-such-user/model': no such file or folder"):
        locate("~no-such-user/model")
