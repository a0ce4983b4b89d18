"""Requests that offer another protocol, as HTTP/2, are read and answered as if they did not."""

import asyncio
import json
import socket
import time
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from quire.server.http.connection import MAX_HEAD_BYTES, Connection
from tests.patience import WAIT_S
from tests.server.running import RunningServer

HTTP_2 = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
WEB_SOCKET = b"upgrade: websocket\r\nsec-websocket-version: 13\r\nconnection: keep-alive, upgrade\r\n"
TWICE = b"UPGRADE: a/1, b\r\nConnection: upgrade\r\nUpgrade:\r\n"
OFFERS = (b"", HTTP_2, WEB_SOCKET, TWICE)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
TEXT = json.dumps({"prompt": "abc", "max_tokens": 2, "temperature": 0}).encode()


class Transport(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what has come."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    headers = [header for header in scope["headers"] if header[0].startswith(b"x-")]
    asked = [scope["method"], scope["raw_path"], scope["query_string"], scope["http_version"], headers, body]
    content = repr(asked).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


def answers(pieces: list[bytes], turns: int = 0) -> tuple[bytes, bool]:
    """What is written to a client that sends `pieces`, and whether the connection is closed. Between two pieces the
    loop has `turns`."""

    async def serve() -> tuple[bytes, bool]:
        config = uvicorn.Config(echo, lifespan="off", log_config=None, access_log=False)
        connection, transport = Connection(config, ServerState(), {}), Transport()
        connection.connection_made(transport)
        for piece in pieces:
            if not transport.is_closed:
                connection.data_received(piece)
            for _ in range(turns):
                await asyncio.sleep(0)
        if transport.is_closed:
            connection.connection_lost(None)
        while connection.tasks:
            _, waiting = await asyncio.wait(connection.tasks, timeout=WAIT_S)
            assert not waiting, "a request has no end"
            await asyncio.sleep(0)
        if not transport.is_closed:
            connection.connection_lost(None)
        return bytes(transport.written), transport.is_closed

    return asyncio.run(serve())


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\nUpgrade: trailer\r\n\r\n"


bodies = st.sampled_from([b"", b"a", TEXT, SMUGGLED, SMUGGLED.replace(b"host", HTTP_2 + b"host"), b"\r\n\r\n" * 3])


@st.composite
def requests(draw: Any) -> tuple[bytes, bytes]:
    """A request with an offer, or none, and the same without."""
    method, body = draw(st.sampled_from([b"POST", b"PUT", b"GET", b"OPTIONS"])), draw(bodies)
    begun = b"%b /a%%20b?c=%d HTTP/1.1\r\nhost: x\r\n" % (method, draw(st.integers(0, 9)))
    headers = draw(st.sampled_from([b"", b"X-Empty:\r\nX-B: \tb \r\nx-b: \xe9\r\n", b"expect: 100-continue\r\n"]))
    is_chunked, size = draw(st.booleans()), draw(st.integers(1, 40))
    length = b"transfer-encoding: chunked\r\n" if is_chunked else b"content-length: %d\r\n" % len(body)
    if not body and draw(st.booleans()):
        is_chunked, length = False, b""
    content = chunked(body, size) if is_chunked else body
    offer = draw(st.sampled_from(OFFERS))
    first, last = (offer, b"") if draw(st.booleans()) else (b"", offer)
    return begun + first + headers + length + last + b"\r\n" + content, begun + headers + length + b"\r\n" + content


@given(st.lists(requests(), min_size=1, max_size=5), st.data(), st.integers(0, 3))
def test_requests_with_offers_are_answered_like_those_without(asked, data, turns):
    offering, plain = (b"".join(stream) for stream in zip(*asked, strict=True))
    places = sorted(data.draw(st.lists(st.integers(0, len(offering)), max_size=12), label="places"))
    pieces = [offering[start:end] for start, end in zip([0, *places], [*places, len(offering)], strict=True)]
    expected, is_closed = answers([plain])
    assert expected.count(b"HTTP/1.1 200 OK") == len(asked)
    found = answers(pieces, turns)
    assert (without_interim(found[0]), found[1]) == (without_interim(expected), is_closed)


def without_interim(written: bytes) -> bytes:
    """Without the answers that let a body come: a body that has come needs none."""
    return written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("content", [b"content-length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
                                     b"transfer-encoding: chunked\r\n\r\n" + chunked(SMUGGLED, 7)])  # fmt: skip
def test_byte_by_byte_and_once_more(offer, content):
    sent = (b"POST / HTTP/1.1\r\nhost: x\r\n" + offer + content) * 2
    written, _ = answers([sent[place : place + 1] for place in range(len(sent))], turns=2)
    assert written.count(b"HTTP/1.1 200 OK") == 2
    assert written.count(repr(SMUGGLED).encode()) == 2


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize(("version", "end"), [(b"1.1", b"connection: close\r\n"), (b"1.0", b"")])
@pytest.mark.parametrize("turns", [0, 3])
def test_the_last_request_of_a_connection_is_the_last(offer, version, end, turns):
    head = b"POST / HTTP/%b\r\nhost: x\r\n%b%bcontent-length: 3\r\n\r\n" % (version, offer, end)
    for pieces in ([head + b"abc" + SMUGGLED], [head, b"abc" + SMUGGLED], [head[:-1], b"\nab", b"c", SMUGGLED]):
        written, is_closed = answers(pieces, turns)
        assert (written.count(b"HTTP/1.1 "), is_closed) == (1, True)
        assert b"abc" in written


def test_a_segment_may_hold_thousands_of_offers():
    written, _ = answers([(b"GET / HTTP/1.1\r\n" + WEB_SOCKET + b"\r\n") * 3000])
    assert written.count(b"HTTP/1.1 200 OK") == 3000


def sent_and_received(server: RunningServer, *pieces: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as one:
        for piece in pieces:
            one.sendall(piece)
            time.sleep(0.02)
        while part := one.recv(65536):
            received += part
    return received


def test_a_completion_and_what_follows_it(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + HTTP_2 + b"content-length: %d\r\n\r\n" % len(TEXT)
    last = b"GET /health HTTP/1.1\r\nhost: x\r\n" + WEB_SOCKET + b"connection: close\r\n\r\n"
    for pieces in ([head + TEXT + last], [head, TEXT + last], [head, TEXT[:5], TEXT[5:], last]):
        received = sent_and_received(server, *pieces)
        assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1 ") == 2
        assert received.count(b'"completion_tokens":2') == 1


def test_a_body_that_waits_for_leave_gets_it_once(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\n" + HTTP_2
    received = sent_and_received(server, head + b"content-length: %d\r\n\r\n" % len(TEXT), TEXT)
    assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert received.count(b"HTTP/1.1 ") == 2


@pytest.mark.parametrize("num_bytes", [MAX_HEAD_BYTES - 300, MAX_HEAD_BYTES + 300, 200_000])
@pytest.mark.parametrize("name", [b"upgrade", b"x-long"])
def test_a_head_with_an_offer_has_the_limit_of_others(name, num_bytes):
    head = b"GET / HTTP/1.1\r\nhost: x\r\n" + HTTP_2 + b"%b: %b\r\n\r\n" % (name, b"a" * num_bytes)
    status = b"HTTP/1.1 200" if num_bytes < MAX_HEAD_BYTES else b"HTTP/1.1 431"
    for pieces in ([head], [head[:-1], head[-1:]], [head[:9000], head[9000:]]):
        written, _ = answers(pieces)
        assert written.startswith(status)
        assert written.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("offer", OFFERS)
def test_what_cannot_be_read_is_refused_once(offer):
    for faulty in (b"transfer-encoding: gzip\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\nxyz\r\n"):
        written, is_closed = answers([b"POST / HTTP/1.1\r\nhost: x\r\n" + offer + faulty])
        assert written.startswith(b"HTTP/1.1 400 ")
        assert is_closed


@pytest.mark.parametrize("offer", OFFERS)
def test_tunnels_are_refused(offer):
    written, is_closed = answers([b"CONNECT example.org:80 HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n" + SMUGGLED])
    assert written.startswith(b"HTTP/1.1 400 ")
    assert written.count(b"HTTP/1.1 ") == 1
    assert is_closed


class Impatient(Connection):
    max_head_s = 0.3
    max_body_s = 0.3


def test_slow_clients_are_let_go(make_server):
    server = make_server(connection=Impatient)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n" + HTTP_2
    assert sent_and_received(server, head).startswith(b"HTTP/1.1 400 ")
    assert sent_and_received(server, head + b"\r\n", b"{") == b""
