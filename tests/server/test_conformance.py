"""The conformance file, against our own server."""

import pytest

from quire.server.settings import ServerSettings
from tests import web
from tests.server.conformance import CASES, cases, differences, wrong_fields


@pytest.mark.parametrize("mode", ["corrected", "exact"])
def test_a_client_of_text_generation_inference_finds_what_it_expects(make_server, mode):
    server = make_server(settings=ServerSettings(tgi_strict=mode == "exact"))
    with web.Client(base_url=server.url) as client:
        found = {case["name"]: differences(client, case) for case in cases(mode)}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_a_difference_is_found():
    assert wrong_fields({"a": [{"b": 1}]}, {"a.0.b": "integer"}) == []
    assert wrong_fields({"a": [{"b": True}]}, {"a.0.b": "integer"}) == ["a.0.b is True, not of type integer"]
    assert wrong_fields({"a": []}, {"a.0.b": "integer", "c": "null"}) == ["no a.0.b", "no c"]
    assert len({case["name"] for case in CASES}) == len(CASES)
