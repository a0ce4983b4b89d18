"""GET /: a page for browsers, and for everyone else what it was."""

import re
import tomllib
from pathlib import Path

import httpx

import quire
from quire.server.http.routes import ROUTES
from quire.server.settings import ServerSettings
from tests import web
from tests.server.processes import Served, free_port, wait_until

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def test_a_browser_gets_the_page_and_a_probe_an_empty_answer(server):
    page = web.get(server.url, headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>Quire</title>" in page.text
    probe = web.get(server.url)  # which takes anything
    assert (probe.status_code, probe.content) == (200, b"")
    assert web.head(server.url, headers=BROWSER).status_code == 200


def test_a_browser_gets_the_page_while_the_server_starts_and_a_client_is_told(model_folder):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    served = Served(model_folder, "build_s=3600", f"port={port}")  # it is never ready
    try:
        wait_until(lambda: is_up(url))
        page = web.get(url, headers=BROWSER)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "The server is starting…" in page.text
        assert web.get(url).status_code == 503  # a probe
        for path in ("/health", "/v1/models"):
            waiting = web.get(url + path, headers=BROWSER)
            assert (waiting.status_code, waiting.json()["reason"]) == (503, "the engine is starting")
    finally:
        served.stop()


def is_up(url: str) -> bool:
    try:
        return web.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_the_page_is_whole_and_may_ask_this_server_alone(server):
    page = web.get(server.url, headers=BROWSER)
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    addresses = set(re.findall(r"https?://[\w./]+", page.text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    assert not re.findall(r"<(?:script|link)[^>]+(?:src|href)=[\"'](?!data:)", page.text)


def test_the_page_comes_without_a_key_and_what_it_asks_for_does_not(make_server):
    server = make_server(settings=ServerSettings(api_key="secret"))
    assert web.get(server.url, headers=BROWSER).status_code == 200
    assert web.get(f"{server.url}/v1/models").status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert web.post(f"{server.url}/v1/chat/completions", json=body).status_code == 401
    key = {"authorization": "Bearer secret"}
    assert web.post(f"{server.url}/v1/chat/completions", json=body, headers=key).status_code == 200


def test_the_page_asks_for_routes_that_there_are(make_server):
    """And tells a wrong key by one of them that needs it."""
    server = make_server(settings=ServerSettings(api_key="secret"))
    page = web.get(server.url, headers=BROWSER).text
    asked = set(re.findall(r'(?:ask|fetch)\("([^"]+)"', page))
    assert asked == {"health", "info", "v1/models/", "tokenize", "v1/chat/completions"}
    assert {f"/{path}".replace("models/", "models/{model}") for path in asked} <= {route.path for route in ROUTES}
    info = web.get(f"{server.url}/info").json()
    assert {"model_id", "max_input_tokens", "max_total_tokens"} <= set(info)
    card = f"{server.url}/v1/models/{info['model_id']}"
    assert web.get(card, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert web.get(card, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_conversation_that_is_too_long_has_the_code_that_the_page_looks_for(server):
    said = [{"role": "user", "content": "once more " * 400}]
    asked = {"model": server.model.name, "messages": said}
    refusal = web.post(f"{server.url}/v1/chat/completions", json=asked | {"max_tokens": 20})
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert '"context_length_exceeded"' in web.get(server.url, headers=BROWSER).text
    count = web.post(f"{server.url}/tokenize", json=asked).json()["count"]
    assert count > server.model.max_input_tokens


def test_what_the_page_sends_is_what_the_server_knows(make_server):
    """Every setting that it offers, on a server that refuses fields it does not know."""
    server = make_server(settings=ServerSettings(strict=True))
    page = web.get(server.url, headers=BROWSER).text
    offered = re.findall(r'\{ id: "(\w+)"', page)
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 3, "seed": 1,
              "repetition_penalty": 1.1, "stop": ["x"]}  # fmt: skip
    assert set(offered) == {"system", "key", *values}
    body = {
        "model": server.model.name,
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **values,
    }
    answer = web.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert '"completion_tokens":' in answer.text


def test_the_page_is_packaged():
    root = Path(quire.__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["quire"]
    packaged = {path for pattern in patterns for path in root.glob(pattern)}
    assert {root / "server/http/web" / name for name in ("index.html", "page.css", "page.js")} <= packaged
