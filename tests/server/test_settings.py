"""Values that the HTTP server cannot work with are refused before it starts."""

import dataclasses
import math
from typing import Any

import pytest

from quire.errors import InvalidSetting
from quire.server.settings import MAX_S, ServerSettings

SECONDS = [field.name for field in dataclasses.fields(ServerSettings) if field.name.endswith("_s")]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e30])
@pytest.mark.parametrize("name", SECONDS)
def test_times_that_no_clock_has_are_refused(name, value):
    with pytest.raises(InvalidSetting, match=rf"^{name} is .*; it must be .* at most 1e\+09$"):
        ServerSettings(**{name: value})
    assert getattr(ServerSettings(**{name: MAX_S}), name) == MAX_S


@pytest.mark.parametrize("name", ["request_timeout_s", "queue_timeout_s", "ssl_handshake_s"])
def test_a_time_in_which_nothing_can_happen_is_refused(name):
    with pytest.raises(InvalidSetting, match=f"^{name} is 0; it must be above 0"):
        ServerSettings(**{name: 0.0})


@pytest.mark.parametrize(
    "name",
    ["max_stop_sequences", "max_top_n_tokens", "max_stored_responses", "max_stored_bytes", "max_engine_restarts"],
)
def test_numbers_below_none_are_refused(name):
    with pytest.raises(InvalidSetting, match=f"^{name} is -1; it must be at least 0$"):
        ServerSettings(**{name: -1})
    assert getattr(ServerSettings(**{name: 0}), name) == 0


@pytest.mark.parametrize("name", ["host", "served_model_name"])
def test_an_empty_name_is_not_every_interface_and_no_model(name):
    values: dict[str, Any] = {name: ""}
    with pytest.raises(InvalidSetting, match=f"^{name} is empty; leave it out for the default$"):
        ServerSettings(**values)


@pytest.mark.parametrize("value", ["one gpu\nanother", "gpu\u20ac", "gpu\u00e9"])
def test_a_compute_type_that_no_header_can_have_is_refused(value):
    with pytest.raises(InvalidSetting, match=r"^compute_type is '.*'; it must be printable ASCII on one line"):
        ServerSettings(compute_type=value)
    assert ServerSettings(compute_type="2 x NVIDIA H200").compute_type == "2 x NVIDIA H200"
