"""Every limit: what just keeps it is served, what just breaks it is refused."""

import ast
import asyncio
import inspect
import json
import socket
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from quire.errors import Unauthorized
from quire.server.api_keys import key_of
from quire.server.http.access import Access
from quire.server.http.connection import MAX_HEAD_BYTES, Connection
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer
from tests.server.vocabulary import PIECES, served_model

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
TEXT = {"prompt": "a", "max_tokens": 1}
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


@pytest.fixture(scope="module")
def server():
    model = replace(served_model(max_total_tokens=64), max_input_tokens=40)
    settings = ServerSettings(payload_limit=20_000)
    one = RunningServer(settings=settings, model=model, max_sequence_tokens=64, max_batch_size=32).start()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def client(server):
    with web.Client(base_url=server.url, headers={"content-type": "application/json"}) as one:
        yield one


def generate(inputs: str = "a", **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": {"max_new_tokens": 1} | parameters}


LIMITS: dict[str, tuple[str, Any, Any]] = {
    "a prompt": (COMPLETIONS, TEXT | {"prompt": "a" * 40}, TEXT | {"prompt": "a" * 41}),
    "a prompt of tokens": (COMPLETIONS, TEXT | {"prompt": [1] * 40}, TEXT | {"prompt": [1] * 41}),
    "inputs": (GENERATE, generate("a" * 40), generate("a" * 41)),
    "a chat": (
        CHATS,
        CHAT | {"messages": [{"role": "user", "content": "a" * (40 - len("user: \nassistant: "))}]},
        CHAT | {"messages": [{"role": "user", "content": "a" * (41 - len("user: \nassistant: "))}]},
    ),
    "an answer": (COMPLETIONS, TEXT | {"max_tokens": 63}, TEXT | {"max_tokens": 64}),
    "an answer of TGI's": (GENERATE, generate(max_new_tokens=63), generate(max_new_tokens=64)),
    "prompt and answer": (
        COMPLETIONS, {"prompt": "a" * 40, "max_tokens": 24}, {"prompt": "a" * 40, "max_tokens": 25}
    ),
    "the least answer": (GENERATE, generate(max_new_tokens=1), generate(max_new_tokens=0)),
    "samples": (COMPLETIONS, TEXT | {"n": 20}, TEXT | {"n": 21}),
    "the fewest samples": (COMPLETIONS, TEXT | {"n": 1}, TEXT | {"n": 0}),
    "best_of": (GENERATE, generate(best_of=20, do_sample=True), generate(best_of=21, do_sample=True)),
    "prompts": (COMPLETIONS, TEXT | {"prompt": ["a"] * 256}, TEXT | {"prompt": ["a"] * 257}),
    "stop strings": (COMPLETIONS, TEXT | {"stop": ["x"] * 16}, TEXT | {"stop": ["x"] * 17}),
    "characters of a stop string": (COMPLETIONS, TEXT | {"stop": "x" * 4096}, TEXT | {"stop": "x" * 4097}),
    "characters of a stop string of TGI's": (GENERATE, generate(stop=["x" * 4096]), generate(stop=["x" * 4097])),
    "stop strings of TGI's": (GENERATE, generate(stop=["x"] * 16), generate(stop=["x"] * 17)),
    "top_n_tokens": (GENERATE, generate(top_n_tokens=20), generate(top_n_tokens=21)),
    "logprobs": (COMPLETIONS, TEXT | {"logprobs": 20}, TEXT | {"logprobs": 21}),
    "top_logprobs": (
        CHATS, CHAT | {"logprobs": True, "top_logprobs": 20}, CHAT | {"logprobs": True, "top_logprobs": 21}
    ),
    "top_p": (COMPLETIONS, TEXT | {"top_p": 1.0}, TEXT | {"top_p": 1.0000001}),
    "the least top_p": (COMPLETIONS, TEXT | {"top_p": 0}, TEXT | {"top_p": -1e-9}),
    "frequency_penalty": (COMPLETIONS, TEXT | {"frequency_penalty": -2}, TEXT | {"frequency_penalty": -2.0001}),
    "a bias": (COMPLETIONS, TEXT | {"logit_bias": {"1": 100}}, TEXT | {"logit_bias": {"1": 100.1}}),
    "a token with a bias": (
        COMPLETIONS, TEXT | {"logit_bias": {str(len(PIECES) - 1): 1}}, TEXT | {"logit_bias": {str(len(PIECES)): 1}}
    ),
    "a token": (COMPLETIONS, TEXT | {"prompt": [len(PIECES) - 2]}, TEXT | {"prompt": [len(PIECES)]}),
    "a token that ends": (
        COMPLETIONS, TEXT | {"stop_token_ids": [len(PIECES) - 1]}, TEXT | {"stop_token_ids": [len(PIECES)]}
    ),
    "the first token": (COMPLETIONS, TEXT | {"prompt": [0]}, TEXT | {"prompt": [-1]}),
    "the body": (
        COMPLETIONS,
        (json.dumps(TEXT)[:-1] + " " * (20_000 - len(json.dumps(TEXT))) + "}").encode(),
        (json.dumps(TEXT)[:-1] + " " * (20_001 - len(json.dumps(TEXT))) + "}").encode(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_what_just_keeps_a_limit_is_served_and_what_just_breaks_it_is_refused(client, name):
    path, *bodies = LIMITS[name]
    served, refused = (
        client.post(path, content=body if isinstance(body, bytes) else json.dumps(body)) for body in bodies
    )
    assert served.status_code == 200, served.text
    assert refused.status_code in {400, 413, 422}, refused.text
    assert refused.json()["error"]


def status_of(server: RunningServer, *pieces: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as one:
        for piece in pieces:
            one.sendall(piece)
        return one.recv(4096).split(b" ")[1]


@pytest.mark.parametrize("num_headers", [1, 50])
def test_headers_have_a_limit(server, num_headers):
    begun, ended = b"GET /health HTTP/1.1\r\nhost: x\r\n", b"\r\n"
    for num_bytes, status in (
        (MAX_HEAD_BYTES - 64, b"200"),
        (MAX_HEAD_BYTES + 64, b"431"),
        (120_000, b"431"),
        (400_000, b"431"),
    ):
        each = (num_bytes - len(begun) - len(ended)) // num_headers
        headers = (b"x-long: " + b"a" * (each - 10) + b"\r\n") * num_headers
        head = begun + headers + ended
        assert status_of(server, head) == status, num_bytes
        assert status_of(server, head[:-4096], head[-4096:]) == status, num_bytes
    assert status_of(server, b"GET /" + b"a" * 120_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n") == b"431"


def test_a_long_body_is_no_long_head(server):
    """Also where the next request begins in the same piece."""
    body = json.dumps(TEXT).encode() + b" " * 18_000
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    assert status_of(server, one * 6 + b"GET /hea") == b"200"


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(json.dumps(TEXT)), json.dumps(TEXT).encode())


@pytest.mark.parametrize("num_bytes", [1000, 2_000_000])
@pytest.mark.parametrize(
    ("begun", "filling", "ended"),
    [
        (CHUNK + b"0\r\n", b"x-a: b\r\n", b"\r\n"),
        (CHUNK + b"0\r\nx-a: ", b"b", b"\r\n\r\n"),
        (CHUNK + b"0;", b"a", b"\r\n\r\n"),
    ],
    ids=["trailers", "one trailer", "a chunk's extension"],
)
def test_what_stands_beside_a_body_has_a_limit(server, begun, filling, ended, num_bytes):
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as one, suppress(ConnectionError):
        one.sendall(CHUNKED + begun)
        for _ in range(10):
            one.sendall(filling * (num_bytes // 10 // len(filling)))
        one.sendall(ended)
        answer = one.recv(4096)
    assert answer.startswith(b"HTTP/1.1 200") if num_bytes == 1000 else not answer


def test_a_trailer_is_no_header(make_server):
    server = make_server(settings=ServerSettings(api_key="secret"))
    key = b"authorization: Bearer secret\r\n"
    assert status_of(server, CHUNKED[:-2] + key + b"\r\n" + CHUNK + b"0\r\n\r\n") == b"200"
    assert status_of(server, CHUNKED + CHUNK + b"0\r\n" + key + b"\r\n") == b"401"


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_refusal_reaches_clients_that_send_their_whole_body_first_on_connections_that_end(make_server, loop_factory):
    """The end of a connection that still received data reset it, and the refusal was lost."""
    server = make_server(settings=ServerSettings(api_key="secret", payload_limit=1000), loop_factory=loop_factory)
    host, port = server.url.removeprefix("http://").split(":")
    body = b"a" * 8_000_000
    for version, key, status in (("1.1", "secret", b"413"), ("1.1", "wrong", b"401"), ("1.0", "secret", b"413")):
        head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as one:
            one.sendall(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            answer = b""
            while part := one.recv(65536):
                answer += part
        assert answer.split(b" ")[1] == status
        assert answer.endswith(b"}")


@pytest.mark.parametrize("rest", [b"nonsense\r\n", b"0\r\n\r\n", b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"])
def test_a_connection_ends_with_the_body_that_was_refused(make_server, rest):
    server = make_server(settings=ServerSettings(payload_limit=10))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as one:
        one.sendall(CHUNKED[:-2] + b"connection: close\r\n\r\n" + CHUNK)
        answer = b""
        while part := one.recv(65536):
            answer += part
        one.sendall(rest)
        server.wait_until(lambda: not server._server.server_state.connections)
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"}")


class Impatient(Connection):
    max_head_s = 1.0
    max_body_s = 1.5


def test_requests_that_never_come_to_their_end_are_let_go_and_answers_that_take_long_are_not():
    server = RunningServer(connection=Impatient, before_result=lambda *_: time.sleep(0.02)).start()
    host, port = server.url.removeprefix("http://").split(":")
    begun = time.monotonic()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
    refused = b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n{"prompt'
    half, no_body, too_long = (socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(3))
    half.sendall(head)
    no_body.sendall(head + b"\r\n{")
    too_long.sendall(refused)
    slow = web.post(f"{server.url}/v1/completions", json=TEXT | {"max_tokens": 100})
    assert slow.json()["usage"]["completion_tokens"] == 100
    assert time.monotonic() - begun > 1.5
    assert half.recv(4096).startswith(b"HTTP/1.1 400")
    assert no_body.recv(4096) == b""
    assert too_long.recv(4096).startswith(b"HTTP/1.1 413")
    while too_long.recv(4096):
        pass  # the rest of the answer, and then the end
    server.wait_until(lambda: server.service.num_streams == 0)
    server.stop()


def test_half_a_body_does_not_hold_up_the_end_of_a_server(caplog):
    server = RunningServer().start()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        server.wait_until(lambda: server.service.metrics.numbers["tgi_request_count"] == 1)
        server.stop()
        assert one.recv(4096).startswith(b"HTTP/1.1 503")
    assert not server._thread.is_alive()
    assert server.service.metrics.failures["dropped"] == 1
    assert not caplog.records


class NotReadFrom(Connection):
    max_unread_s = 0.2


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_client_that_does_not_read_is_let_go(make_server, loop_factory):
    """Its connection and its places among the open sequences were kept for as long as it liked."""
    many = {"prompt": "abc", "max_tokens": 480, "n": 16, "temperature": 1, "logprobs": 20, "stream": True}
    server = make_server(connection=NotReadFrom, loop_factory=loop_factory)
    content = json.dumps(many).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.connect((host, int(port)))
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        server.wait_until(lambda: server.service.num_streams == 1)
        server.wait_until(lambda: not server._server.server_state.connections)
    server.wait_until(lambda: server.service.num_streams == 0)


HORRORS = [
    "\u0000\u0001\u001f\u007f\u0085",  # control characters
    "\u202e\u2066abc\u2069\u200f",  # directions
    "\ufeff\u200b\u200d\u2060",  # that nobody sees
    "e\u0301" * 10 + "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324",  # accents on accents
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3f4\U000e0067\U000e0062\U000e007f",  # clusters
    "\uffff\ufffe\U0010ffff\ufdd0",  # that are no characters
    "\ufdfa" * 5 + "\u1e9e\u0130\u0345",  # that grow when they are normalised or lowered
    "\u2028\u2029\r\n\x0b\x0c",  # ends of lines, which events must not have
    "data: [DONE]\n\ndata: {}\n\n",  # what a stream is made of
    "<|end|><|im_start|>system\n</s>[INST]",  # what templates are made of
    "{{ 7 * 7 }}{% for x in range(9) %}%s${jndi:ldap://x}",
    "\ud800",  # half a character, which JSON can say
]


@pytest.mark.parametrize("text", HORRORS, ids=ascii)
def test_texts_that_are_horrors_are_served_or_refused_by_every_route(client, text):
    """As a prompt, as a message, as a stop string and as a name; streamed and not, and the stream is whole."""
    for path, body in (
        (COMPLETIONS, TEXT | {"prompt": text}),
        (CHATS, CHAT | {"messages": [{"role": "user", "content": text, "name": text}], "user": text}),
        (GENERATE, generate(text)),
        (COMPLETIONS, TEXT | {"stop": text}),
        ("/tokenize", {"inputs": text}),
    ):
        statuses = []
        for more in ({}, {"stream": True}) if path in (COMPLETIONS, CHATS) else ({},):
            answer = client.post(path, content=json.dumps(body | more))
            statuses.append(answer.status_code)
            assert answer.status_code in {200, 400, 422}, (path, answer.text)
            if answer.status_code == 200 and more:
                assert answer.text.endswith("data: [DONE]\n\n")
                for line in answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
                    json.loads(line.removeprefix("data: "))
        assert len(set(statuses)) == 1, (path, statuses)


class NeverCompared(bytes):
    """Bytes that only a comparison which takes as long for all of them may look at."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it would tell by the time how much of a key is right")

    def __hash__(self) -> int:
        raise AssertionError("it would be looked for in a table, which compares as well")


def test_keys_are_compared_by_digests_and_in_constant_time():
    access = Access([key_of(name, name, {}) for name in ("first", "second")], isolates=False)
    assert [len(digest) for digest in access._digests] == [32, 32]  # however long the keys are
    access._digests = [NeverCompared(digest) for digest in access._digests]

    def is_allowed(key: bytes) -> bool:
        try:
            access.check({"headers": [(b"authorization", b"Bearer " + key)]})
        except Unauthorized:
            return False
        return True

    assert [is_allowed(key) for key in (b"first", b"second", b"firs", b"firsu", b"")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_key_is_compared_with_all_keys_whichever_matches():
    """In a list: `any` over a generator would end at the first that matches."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Access.check)))
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.ListComp)]
    assert [ast.unparse(node) for node in compared] == [
        "[hmac.compare_digest(digest, known) for known in self._digests]"
    ]
    assert ast.unparse(tree).count("_digests") == 1
