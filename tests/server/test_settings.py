"""Settings of a server that would be refused with each request, or end it, are refused at its start."""

import math
from dataclasses import fields

import pytest

from quire.errors import InvalidSetting
from quire.server.settings import ServerSettings

TIMES = [field.name for field in fields(ServerSettings) if field.name.endswith("_s")]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [math.inf, math.nan, -0.1])
def test_a_time_is_a_number_of_seconds(name: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=rf"{name} is {value}; it must be at least 0, and finite"):
        ServerSettings(**{name: value})


@pytest.mark.parametrize("name", ["request_timeout_s", "queue_timeout_s"])
def test_no_request_is_given_no_time(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} is 0; it must be above 0, or left out for no limit"):
        ServerSettings(**{name: 0.0})
    assert getattr(ServerSettings(**{name: 0.001}), name) == 0.001


@pytest.mark.parametrize("name", ["max_stop_sequences", "max_top_n_tokens", "max_engine_restarts"])
def test_a_number_of_things_is_not_negative(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} is -1; it must be at least 0"):
        ServerSettings(**{name: -1})
    assert getattr(ServerSettings(**{name: 0}), name) == 0
