"""Headers, statuses and lines of the log that every answer has, whatever was asked."""

import json
import logging
import threading

import pytest

from quire.errors import InvalidRequest, Overloaded
from quire.server.observe.refusal_log import MAX_LINES, REFILL_S, RefusalLog
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.test_half_closed import connected, everything

TEXT = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


# x-request-id


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", TEXT),
        ("POST", "/v1/completions", TEXT | {"stream": True}),
        ("POST", "/v1/completions", {}),
        ("POST", "/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
        ("GET", "/health", None),
        ("GET", "/metrics", None),
        ("GET", "/nowhere", None),
        ("PUT", "/health", None),
    ],
)
def test_every_answer_has_the_id_of_its_request(server, method, path, body):
    made = [web.request(method, server.url + path, json=body).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    given = web.request(method, server.url + path, json=body, headers={"x-request-id": "client-7_a.b:c"})
    assert given.headers["x-request-id"] == "client-7_a.b:c"


@pytest.mark.parametrize("unsafe", ["a b", "x" * 129, "", 'a"b', "é".encode()])
def test_an_id_that_is_not_safe_in_a_header_or_a_log_is_replaced(server, unsafe):
    answer = web.get(f"{server.url}/health", headers={"x-request-id": unsafe})
    assert answer.headers["x-request-id"].startswith("req_")


def test_answers_to_what_is_no_request_have_an_id_too(server):
    for raw in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 70_000):
        with connected(server) as one:
            one.sendall(raw)
            head = everything(one).partition(b"\r\n\r\n")[0]
        assert b"\r\nx-request-id: req_" in head, head[:200]


def test_answers_to_browsers_that_ask_first_have_an_id_too(make_server):
    server = make_server(settings=ServerSettings(cors_allow_origin=("*",)))
    asked = {"origin": "http://a.example", "access-control-request-method": "POST"}
    assert web.options(f"{server.url}/v1/completions", headers=asked).headers["x-request-id"].startswith("req_")


# Methods


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/", "GET, HEAD, POST"),
        ("POST", "/v1/models/fake", "GET, HEAD"),
        ("DELETE", "/metrics", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_answered_with_the_right_ones(server, method, path, allowed):
    answer = web.request(method, server.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


# HTTP/1.0


def ask_by_http_1_0(server, path: str, body: dict | None = None, headers: str = "") -> tuple[bytes, bytes]:
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.0\r\n{headers}content-length: {len(content)}\r\n\r\n"
    with connected(server) as one:
        one.sendall(head.encode() + content)
        answered, _, rest = everything(one).partition(b"\r\n\r\n")
    return answered.lower(), rest


@pytest.mark.parametrize("headers", ["", "connection: keep-alive\r\n"])
def test_a_stream_by_http_1_0_is_not_chunked_and_ends_with_the_connection(server, headers):
    head, body = ask_by_http_1_0(server, "/v1/completions", TEXT | {"stream": True}, headers)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in body.decode().split("\n\n")[:-2]]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == server.expected_text(server.model.tokenizer.encode("abc"), 6)


def test_a_whole_answer_by_http_1_0_has_its_length(server):
    for path, asked in (("/v1/completions", TEXT), ("/v1/models", None), ("/nowhere", None)):
        head, body = ask_by_http_1_0(server, path, asked)
        assert b"transfer-encoding" not in head
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)


def test_a_stream_that_fails_by_http_1_0_ends_with_its_error(make_server):
    steps = threading.Semaphore(3)
    server = make_server(before_result=lambda *_: steps.acquire(timeout=WAIT_S))
    content = json.dumps(TEXT | {"stream": True, "max_tokens": 300}).encode()
    with connected(server) as one:
        one.sendall(f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        begun = one.recv(65536)
        server.loop.call_soon_threadsafe(server.service.disconnect, "the engine process ended")
        body = (begun + everything(one)).partition(b"\r\n\r\n")[2]
    steps.release(1000)
    assert b"the engine process ended" in body.split(b"\n\n")[-2]


# Errors


def error(server, body, path="/v1/chat/completions") -> dict:
    return web.post(server.url + path, json=body).json()["error"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (CHAT | {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        (CHAT | {"max_tokens": 600}, "max_tokens"),
        (CHAT | {"max_tokens": None, "messages": [{"role": "user", "content": "a" * 494}]}, "messages"),
    ],
)
def test_a_context_that_is_too_long_is_told_in_the_words_that_clients_look_for(server, body, param):
    """litellm turns to its fallbacks for long contexts when it finds these words."""
    found = error(server, body)
    assert "This model's maximum context length is 512 tokens." in found["message"]
    assert (found["code"], found["param"], found["type"]) == ("context_length_exceeded", param, "invalid_request_error")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        (CHAT | {"stream_options": {"colour": 1}, "stream": True}, "stream_options.colour"),
        (CHAT | {"logit_bias": {"a": "b"}}, "logit_bias"),
        (CHAT | {"messages": ["a"]}, "messages[0]"),
        (CHAT | {"stop": [1]}, "stop[0]"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT | {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT | {"messages": []}, "messages"),
        (CHAT | {"seed": 2**70}, "seed"),
        (CHAT | {"priority": 2**70}, "priority"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"metadata": []}, "metadata"),
        (CHAT | {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        (CHAT | {"min_tokens": 9}, "min_tokens"),
        (CHAT | {"temperature": -1}, "temperature"),
        (CHAT | {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ],
)
def test_param_names_the_field(server, body, param):
    assert error(server, body)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        (TEXT | {"logprobs": 21}, "logprobs"),
    ],
)
def test_param_names_the_field_of_a_completion(server, body, param):
    assert error(server, body, "/v1/completions")["param"] == param


# The log


@pytest.fixture
def refusals(caplog):
    caplog.set_level(logging.INFO, logger="quire")
    return lambda: [record for record in caplog.records if record.getMessage() == "request refused"]


def test_a_refused_request_is_one_line_with_its_route_and_field(make_server, refusals):
    server = make_server()  # the one for all has lines left only if no test before has been refused too often
    asked = {"x-request-id": "mine"}
    web.post(f"{server.url}/v1/completions", json=TEXT | {"temperature": -1}, headers=asked)
    web.post(f"{server.url}/tokenize", json={})
    web.get(f"{server.url}/nowhere")
    first, second, third = refusals()
    assert (first.route, first.status, first.kind) == ("POST /v1/completions", 400, "validation")
    assert (first.param, first.request_id) == ("temperature", "mine")
    assert (second.route, second.status) == ("POST /tokenize", 422)
    assert (third.route, third.status, third.kind) == ("GET without a route", 404, "not_found")


def test_a_request_that_fails_in_the_engine_has_the_line_of_its_stream_only(make_server, refusals, caplog):
    server = make_server(settings=ServerSettings(request_timeout_s=0.001))
    assert web.post(f"{server.url}/v1/completions", json=TEXT | {"max_tokens": 500}).status_code == 504
    server.wait_until(lambda: any(record.getMessage() == "request" for record in caplog.records))
    assert refusals() == []


def test_many_refusals_are_counted_instead_of_written(refusals):
    now = 0.0
    log = RefusalLog(lambda: now)
    for _ in range(MAX_LINES + 7):
        log.note("POST /generate", 422, InvalidRequest("secret words", param="p" * 1000))
    assert len(refusals()) == MAX_LINES
    now += REFILL_S / MAX_LINES * 1.5
    log.note("POST /generate", 429, Overloaded("busy"))
    log.note("POST /generate", 429, Overloaded("busy"))
    last = refusals()[-1]
    assert (len(refusals()), last.refused_without_a_line, last.kind) == (MAX_LINES + 1, 7, "overloaded")
    assert all(len(getattr(record, "param", "")) <= 100 for record in refusals())
