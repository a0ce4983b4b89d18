"""Settings that do not work in a group are refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidSetting
from quire.server.processes.serve import serve
from quire.server.settings import ServerSettings
from quire.settings.config import Config
from quire.settings.group import GroupSettings

GROUP = GroupSettings(2, 0, "127.0.0.1:7000", group_secret="0123456789abcdef")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({}, {"data_parallel": 2}),
        ({"draft_model": "default", "speculate": 4}, {}),
        ({"lora_adapters": ("a=b",)}, {}),
        ({"adapter_folder": Path("adapters")}, {}),
        ({"host_cache_gib": 1.5}, {}),
    ],
)
def test_a_setting_that_a_group_does_not_have_is_named(rank: int, config: dict[str, Any], settings: dict[str, Any]):
    group = GroupSettings(2, rank, GROUP.group_address, group_secret=GROUP.group_secret)
    name = next(iter(config or settings))
    with pytest.raises(InvalidSetting, match=f"^{name} is .*group_size"):
        serve(Config(**config), ServerSettings(**settings), group)
