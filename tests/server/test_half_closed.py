"""Clients that close one side of their connection, or both."""

import asyncio
import json
import select
import socket
import threading

import pytest
import uvloop

from tests import web
from tests.patience import WAIT_S
from tests.server.gate import Gate as Steps
from tests.server.running import RunningServer

TEXT = {"prompt": "abc", "max_tokens": 6, "temperature": 0}


def connected(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def post(body: dict, version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def everything(one: socket.socket) -> bytes:
    parts = []
    while part := one.recv(65536):
        parts.append(part)
    return b"".join(parts)


def final_response(raw: bytes) -> tuple[bytes, bytes]:
    """The status line and the rest, after interim responses."""
    while raw.startswith(b"HTTP/1.1 100 "):
        raw = raw.partition(b"\r\n\r\n")[2]
    status, _, rest = raw.partition(b"\r\n")
    return status, rest


class Gate:
    """Holds the engine's results back, after the first `num_free`, until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_free = 0

    def __call__(self, *_: object) -> None:
        if self.num_free:
            self.num_free -= 1
        else:
            assert self.opened.wait(WAIT_S)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def server(request, make_server, gate):
    yield make_server(before_result=gate, loop_factory=request.param)
    gate.opened.set()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_reads_on_gets_its_answer(server, gate, stream, version):
    with connected(server) as one:
        one.sendall(post(TEXT | {"stream": stream}, version))
        one.shutdown(socket.SHUT_WR)
        server.wait_until(lambda: server.service.num_streams == 1)
        gate.opened.set()
        status, rest = final_response(everything(one))
    assert status == b"HTTP/1.1 200 OK"
    assert (b"data: [DONE]" if stream else b'"usage"') in rest


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_a_client_that_is_gone_is_aborted(server, stream):
    one = connected(server)
    one.sendall(post(TEXT | {"stream": stream}))
    server.wait_until(lambda: server.service.num_streams == 1)
    one.close()
    server.wait_until(lambda: server.service.num_streams == 0)  # while no result has come


def test_a_client_that_leaves_after_it_has_closed_one_side_is_noticed(server):
    one = connected(server)
    one.sendall(post(TEXT))
    one.shutdown(socket.SHUT_WR)
    server.wait_until(lambda: server.service.num_streams == 1)
    one.close()
    server.wait_until(lambda: server.service.num_streams == 0)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_only_reads_on_gets_the_rest_of_its_stream(server, gate, version):
    gate.num_free = 2
    with connected(server) as one:
        one.sendall(post(TEXT | {"stream": True}, version))
        begin = one.recv(65536)
        one.shutdown(socket.SHUT_WR)
        gate.opened.set()
        raw = begin + everything(one)
    assert raw.count(b"data: {") >= 6
    assert b"data: [DONE]" in raw


def test_a_stream_of_a_client_that_is_gone_is_aborted(server, gate):
    gate.num_free = 2
    one = connected(server)
    one.sendall(post(TEXT | {"stream": True}))
    assert one.recv(65536)
    one.close()
    server.wait_until(lambda: server.service.num_streams == 0)  # while no further result has come


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_stream_of_a_client_that_is_gone_is_aborted_although_a_request_waits_behind_it(make_server, loop_factory):
    steps = Steps()
    server = make_server(before_result=steps, loop_factory=loop_factory)
    one = connected(server)
    one.sendall(post(TEXT | {"stream": True, "max_tokens": 500}))
    steps.step_until(lambda: bool(select.select([one], [], [], 0)[0]))
    one.sendall(post(TEXT))
    one.close()
    steps.step_until(lambda: server.service.num_streams == 0)  # what is written is refused; nothing is read meanwhile
    steps.open()
    assert server.service.metrics.failures["dropped"] == 1
    assert server.service.metrics.numbers["tgi_request_count"] == 1


def test_half_a_body_and_then_the_end_is_let_go(server):
    with connected(server) as one:
        one.sendall(post(TEXT)[:-5])
        one.shutdown(socket.SHUT_WR)
        assert everything(one) == b""
    assert server.service.num_streams == 0


def test_a_client_that_leaves_within_its_body_is_counted_like_others_that_leave(server):
    metrics = server.service.metrics
    one, other, tokenizing = (connected(server) for _ in range(3))
    tokenizing.sendall(post(TEXT)[:-5].replace(b"/v1/completions", b"/tokenize"))
    one.sendall(post(TEXT)[:-5])
    other.sendall(post(TEXT))
    server.wait_until(lambda: server.service.num_streams == 1 and metrics.numbers["tgi_request_count"] == 2)
    for each in (tokenizing, one, other):
        each.close()
    server.wait_until(lambda: sum(metrics.failures.values()) >= 2)
    web.get(f"{server.url}/health")  # what was under way has had its turn
    assert {name: count for name, count in metrics.failures.items() if count} == {"dropped": 2}
    assert (metrics.numbers["tgi_request_count"], metrics.numbers["tgi_request_success"]) == (2, 0)
