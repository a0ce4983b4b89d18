"""Data behind a request whose answer is still under way."""

import asyncio

import pytest
import uvloop

from quire.server.http.connection import MAX_HEAD_BYTES, Connection
from tests.server.gate import Gate
from tests.server.test_half_closed import TEXT, connected, everything, post

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Impatient(Connection):
    max_head_s = 0.1


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def server(request, make_server, gate):
    yield make_server(before_result=gate, loop_factory=request.param, connection=Impatient)
    gate.open()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behind",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx-long: " + b"a" * MAX_HEAD_BYTES,
        b"GET /health HTT",
        CHUNKED + b"nonsense\r\n",
    ],
    ids=["no request", "a long head", "a head that does not come", "a body that cannot be read"],
)
def test_an_answer_comes_whole_whatever_is_sent_behind_its_request(server, gate, stream, behind):
    with connected(server) as one:
        one.sendall(post(TEXT | {"stream": stream, "max_tokens": 20}))
        gate.let(2)
        server.wait_until(lambda: server.service.num_streams == 1)
        begin = one.recv(65536) if stream else b""
        one.sendall(behind)
        server.wait_until(lambda: is_refused(server))
        gate.open()
        raw = begin + everything(one)
    assert raw.startswith(b"HTTP/1.1 200")
    assert raw.count(b"HTTP/1.1") == 1
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def is_refused(server) -> bool:
    """What was sent last is known to be no request."""
    return any(one._is_refused for one in server._server.server_state.connections)


def test_requests_that_wait_are_answered_before_the_connection_ends(server, gate):
    with connected(server) as one:
        one.sendall(post(TEXT) + HEALTH + b"nonsense\r\n\r\n" + HEALTH)
        server.wait_until(lambda: is_refused(server))
        gate.open()
        raw = everything(one)
    assert raw.count(b"HTTP/1.1 200") == raw.count(b"HTTP/1.1") == 2
