"""Roles beside other settings: refused by name before anything starts."""

import pytest

from quire.cli.doctor import role_of
from quire.errors import InvalidSetting
from quire.server.processes.serve import serve
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings
from quire.settings.host_cache import HOST_CACHE_GIB, with_host_cache
from quire.settings.page_folder import FolderSettings
from quire.settings.peers import PeerSettings
from tests.peers.test_settings import DECODE, PREFILL

GROUP = GroupSettings(group_size=2, group_address="10.0.0.1:7000", group_secret="0123456789abcdef")


@pytest.mark.parametrize(
    ("config", "settings", "group", "peers", "words"),
    [
        ({}, {}, GROUP, DECODE, "role is decode; it does not go with group_size = 2"),
        ({}, {"data_parallel": 2}, None, PREFILL, "data_parallel is 2; it does not go with role = prefill"),
        ({"prefix_caching": False}, {}, None, DECODE, "role is decode; it needs prefix_caching"),
        ({}, {}, None, DECODE | {"peer_secret": "short"}, "has 5 bytes"),
    ],
)
def test_a_role_is_refused_beside(config, settings, group, peers, words):
    with pytest.raises(InvalidSetting) as refused:
        serve(Config(**config), ServerSettings(**settings), group, PeerSettings(**peers))
    assert words in str(refused.value)


def test_pages_from_elsewhere_turn_the_host_cache_on():
    pages = PeerSettings(**PREFILL), FolderSettings()
    assert 0 < with_host_cache(Config(), *pages).host_cache_gib <= HOST_CACHE_GIB
    assert with_host_cache(Config(host_cache_gib=0.5), *pages).host_cache_gib == 0.5
    assert with_host_cache(Config(), PeerSettings(), FolderSettings()) == Config()


def test_the_doctor_says_what_a_role_does():
    both = PeerSettings(**(PREFILL | DECODE | {"role": "both"}))
    assert role_of(both)["role"] == (
        "both: computes prompts for servers that connect to 0.0.0.0:7100; lets 10.0.0.1:7100, 10.0.0.2:7100, ::1:7100 "
        "compute prompts with more than 256 tokens that are not cached, for at most 10 s each"
    )
    assert role_of(PeerSettings()) == {}
