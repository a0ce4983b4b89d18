"""A request takes as many places as it asks for sequences."""

import threading
from typing import Any

import httpx
import pytest

from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer

TEXT = {"prompt": "abc", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
AN_INPUT = {"name": "a", "shape": [1], "datatype": "BYTES", "data": [97]}


@pytest.fixture
def opened():
    """Set once the engine may give results."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def server(make_server, opened):
    settings = ServerSettings(max_concurrent_requests=8, max_best_of=20)
    return make_server(settings=settings, before_result=lambda *_: opened.wait(WAIT_S))


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return web.post(server.url + path, json=body)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", TEXT | {"prompt": ["a", "b", "c"], "n": 3}, "n asks for 9 sequences, of 3 prompts"),
        ("/v1/completions", TEXT | {"n": 1, "best_of": 9}, "n asks for 9 sequences, of 1 prompts"),
        ("/v1/chat/completions", CHAT | {"n": 9}, "n asks for 9 sequences"),
        ("/generate", {"inputs": "a", "parameters": {"best_of": 9, "do_sample": True}}, "best_of asks for 9 sequences"),
        ("/vertex", {"instances": [{"inputs": "a"}] * 9}, "instances asks for 9 sequences, of 9 prompts"),
        (
            "/v2/models/fake/versions/1/infer",
            {"id": "1", "inputs": [AN_INPUT] * 9, "outputs": [{"name": "a"}] * 9},
            "inputs asks for 9 sequences",
        ),
    ],
)
def test_more_sequences_than_there_are_places_are_refused_for_good(server, path, body, message):
    answer = post(server, path, body)
    error = answer.json()["error"]
    assert answer.status_code in {400, 422}
    assert "retry-after" not in answer.headers
    assert f"{message}" in (error if isinstance(error, str) else error["message"])
    assert "the limit is 8, --max-concurrent-requests" in answer.text


def test_a_request_waits_for_all_of_its_places(server, opened):
    first = threading.Thread(target=post, args=(server, "/v1/completions", TEXT | {"prompt": ["a", "b"], "n": 3}))
    first.start()
    server.wait_until(lambda: server.service.num_streams == 1)
    refused = post(server, "/v1/chat/completions", CHAT | {"n": 3})
    assert refused.status_code == 429
    assert "6 sequences are open, and 3 more are asked for; the limit is 8" in refused.json()["error"]["message"]
    second = threading.Thread(target=post, args=(server, "/v1/completions", TEXT | {"prompt": "x"}))
    second.start()
    server.wait_until(lambda: server.service.num_streams == 2)  # there is a place for one
    opened.set()
    first.join(WAIT_S)
    second.join(WAIT_S)
    server.wait_until(lambda: server.service.num_streams == 0)
    assert post(server, "/v1/completions", TEXT | {"prompt": ["a", "b"], "n": 4}).status_code == 200
    server.wait_until(lambda: server.service.num_streams == 0)
