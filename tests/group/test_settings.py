"""Settings of a group: what cannot work is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidSetting
from quire.settings.group import GroupSettings

SECRET = "0123456789abcdef"


def test_one_process_is_no_group_and_needs_nothing():
    assert not GroupSettings().is_group


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 2000}, "group_size is 2000"),
        ({"group_rank": 1}, "group_rank is 1; with group_size = 1"),
        ({"group_size": 2, "group_rank": 2, "group_address": "a:1"}, "group_rank is 2; with group_size = 2"),
        ({"group_size": 2, "group_rank": -1, "group_address": "a:1"}, "group_rank is -1"),
        ({"group_size": 2, "group_secret": SECRET}, "group_size needs group_address"),
        ({"group_size": 2, "group_address": "host:1"}, "QUIRE_GROUP_SECRET"),
        *(
            ({"group_size": 2, "group_address": address, "group_secret": SECRET}, "it must be HOST:PORT")
            for address in ("", "host", ":1", "host:", "host:0", "host:70000", "host:x", "host:٣", "[]:1")
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(given, message):
    with pytest.raises(InvalidSetting) as refused:
        GroupSettings(**given)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [("10.0.0.1:7000", ("10.0.0.1", 7000)), ("a.b.svc:1", ("a.b.svc", 1)), ("[::1]:9", ("::1", 9))],
)
def test_addresses(address, endpoint):
    assert GroupSettings(2, 0, address, group_secret=SECRET).endpoint == endpoint


@given(st.text(max_size=40))
def test_any_address_is_understood_or_refused(text):
    try:
        host, port = GroupSettings(2, 0, text, group_secret=SECRET).endpoint
    except InvalidSetting:
        return
    assert host
    assert 1 <= port <= 65535


def test_the_secret_of_a_file_counts_and_ends_with_its_line(tmp_path):
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    settings = GroupSettings(2, 0, "host:1", tmp_path / "secret", "another one that is not used")
    assert settings.secret() == SECRET.encode()
    assert SECRET not in repr(settings)


@pytest.mark.parametrize("text", ["", "short", "x" * 5000])
def test_a_secret_that_is_too_short_or_too_long_is_refused_and_not_shown(tmp_path, text):
    (tmp_path / "secret").write_text(text)
    with pytest.raises(InvalidSetting, match="between 16 and 4096"):
        GroupSettings(2, 0, "host:1", tmp_path / "secret").secret()


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidSetting, match="nowhere"):
        GroupSettings(2, 0, "host:1", tmp_path / "nowhere").secret()
