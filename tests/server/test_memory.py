"""A request that is over is gone at once: the garbage collector comes seldom, and requests may be large."""

import gc
from collections.abc import Iterator

import httpx
import pytest

from quire.server.service.stream import Stream
from tests.fake_executor import NAN
from tests.patience import WAIT_S
from tests.server.processes import wait_until

RESPONSE = {"input": "ab", "max_output_tokens": 5, "store": False}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 5}
ASKED = [
    ("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 5, "stop": "zzz", "n": 2}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 5, "stream": True, "echo": True, "logprobs": 1}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "timings": True}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", RESPONSE | {"stream": True, "timings": True}),
    ("/v1/messages", CHAT),
    ("/v1/messages", CHAT | {"stream": True, "timings": True}),
    ("/generate", {"inputs": "ab", "parameters": {"max_new_tokens": 5, "details": True}}),
    ("/generate_stream", {"inputs": "ab", "parameters": {"max_new_tokens": 5}}),
    ("/vertex", {"instances": [{"inputs": "ab", "parameters": {"max_new_tokens": 5}}]}),
]


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_left(service: object) -> int:
    """Streams of `service` that are still in memory, with all that they hold."""
    return sum(isinstance(one, Stream) and one.service is service for one in gc.get_objects())


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_an_answered_request_leaves_nothing_to_the_garbage_collector(make_server, without_collector, path, body):
    server = make_server()
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    wait_until(lambda: not num_left(server.service))


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_leaves_nothing_to_the_garbage_collector(make_server, without_collector, stream):
    server = make_server()
    body = {"prompt": [NAN, 3], "max_tokens": 5, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
    # The headers of a stream may be on their way before its first step fails.
    assert answer.status_code == 500 or (stream and '"error"' in answer.text), answer.text
    wait_until(lambda: not num_left(server.service))
