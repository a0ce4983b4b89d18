"""The pages and the bodies that reach the model."""

import httpx
import pytest

from quire.server.settings import ServerSettings
from tests import web
from tests.server.running import RunningServer

SMALL = {"prompt": "abc", "max_tokens": 1}
REBOUND = "http://rebound.example:8000"


def ask(server: RunningServer, **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.post(f"{server.url}/v1/completions", json=SMALL, headers=given)


def preflight(server: RunningServer, origin: str) -> httpx.Response:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    return web.options(f"{server.url}/v1/completions", headers=asked)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},  # of a frame without an origin of its own
        {"origin": "file://"},
        {"origin": "http://127.0.0.1:1"},  # another server of this machine
        {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
        {"origin": "https://evil.example", "sec-fetch-site": "same-site"},
        {"origin": REBOUND, "host": "rebound.example:8000"},
        {"origin": REBOUND, "host": "rebound.example:8000", "x-forwarded-host": "rebound.example:8000"},
        {"origin": "http://localhost.evil.example", "host": "localhost.evil.example"},
    ],
)
def test_a_page_of_another_origin_does_not_reach_the_model(server, headers):
    before = server.service.metrics.numbers["tgi_request_count"]
    answer = ask(server, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_origin")
    assert "--cors-allow-origin" in answer.json()["error"]["message"]
    assert server.service.metrics.numbers["tgi_request_count"] == before
    messages = web.post(f"{server.url}/v1/messages", json=SMALL, headers=headers)
    assert (messages.status_code, messages.json()["error"]["type"]) == (403, "permission_error")


def test_pages_of_the_server_itself_and_programs_do(server):
    address = server.url.removeprefix("http://")
    port = address.rpartition(":")[2]
    for headers in (
        {},
        {"host": "llm.example"},  # of a program, through a proxy that keeps the name
        {"origin": server.url},
        {"origin": f"http://localhost:{port}", "host": f"localhost:{port}"},
        {"origin": f"http://[::1]:{port}", "host": f"[::1]:{port}"},
        {"origin": "http://127.0.0.1", "host": "127.0.0.1"},
        {"origin": "http://127.0.0.1", "host": "127.0.0.1:80"},
        {"origin": "http://Chat.localhost", "host": "chat.localhost"},
        {"origin": "https://llm.example", "x-forwarded-host": "llm.example"},  # through a proxy that replaces it
        {"origin": "https://llm.example", "host": "llm.example", "sec-fetch-site": "same-origin"},
    ):
        assert ask(server, **headers).status_code == 200, headers


def test_a_server_of_containers_is_reached_by_any_name(make_server):
    server = make_server(settings=ServerSettings(host="0.0.0.0"))
    assert ask(server, origin="http://quire.default.svc:8000", host="quire.default.svc:8000").status_code == 200
    assert ask(server, origin="http://other.default.svc", host="quire.default.svc:8000").status_code == 403


def test_with_a_key_a_page_needs_nothing_but_the_key(make_server):
    server = make_server(settings=ServerSettings(api_key="key"))
    assert ask(server, origin="https://other.example").status_code == 401
    assert ask(server, origin="https://other.example", authorization="Bearer key").status_code == 200


@pytest.mark.parametrize("keys", [{}, {"api_key": "key"}], ids=["open", "keyed"])
@pytest.mark.parametrize("allowed", [(), ("https://one.example",), ("*",)], ids=["none", "one", "all"])
def test_a_preflight_is_answered_as_its_request_would_be(make_server, keys, allowed):
    server = make_server(settings=ServerSettings(cors_allow_origin=allowed, **keys))
    bearer = {"authorization": "Bearer key"} if keys else {}
    for origin in ("https://one.example", "https://two.example"):
        is_allowed = origin in allowed or "*" in allowed
        first, then = preflight(server, origin), ask(server, origin=origin, **bearer)
        assert first.status_code == (200 if is_allowed else 403)
        assert ("access-control-allow-origin" in first.headers) is is_allowed
        assert ("access-control-allow-origin" in then.headers) is is_allowed
        assert then.status_code == (200 if is_allowed or keys else 403)
        if not is_allowed:
            assert first.json()["error"]["code"] == "forbidden_origin"
            assert first.headers["x-request-id"]


ROUTES = ("/v1/completions", "/v1/messages", "/v1/responses", "/generate", "/tokenize")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "text/json", "json"]
)
def test_a_body_that_says_it_is_no_json_is_refused_with_what_it_said(server, path, kind):
    answer = web.post(server.url + path, content=b"{}", headers={"content-type": kind})
    assert (answer.status_code, answer.headers["accept-post"]) == (415, "application/json")
    assert f"Content-Type is {kind!r}; it must be application/json" in answer.text


@pytest.mark.parametrize(
    "kind", [None, "application/json", "Application/JSON; charset=utf-8", "application/vnd.some+json"]
)
def test_a_body_of_json_is_read(server, kind):
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"prompt": "abc", "max_tokens": 1}'
    assert web.post(f"{server.url}/v1/completions", content=body, headers=headers).status_code == 200
