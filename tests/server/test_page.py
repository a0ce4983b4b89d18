"""GET /: a page for browsers, and for everyone else what it was."""

import re
import tomllib
from pathlib import Path

import httpx

import quire
from quire.server.settings import ServerSettings

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def test_a_browser_gets_the_page_and_a_probe_an_empty_answer(server):
    page = httpx.get(server.url, headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>Quire</title>" in page.text
    probe = httpx.get(server.url)  # which takes anything
    assert (probe.status_code, probe.content) == (200, b"")
    assert httpx.head(server.url, headers=BROWSER).status_code == 200


def test_the_page_is_whole_and_may_ask_this_server_alone(server):
    page = httpx.get(server.url, headers=BROWSER)
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    addresses = set(re.findall(r"https?://[\w./]+", page.text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    assert not re.findall(r"<(?:script|link)[^>]+(?:src|href)=[\"'](?!data:)", page.text)


def test_the_page_comes_without_a_key_and_what_it_asks_for_does_not(make_server):
    server = make_server(settings=ServerSettings(api_key="secret"))
    assert httpx.get(server.url, headers=BROWSER).status_code == 200
    assert httpx.get(f"{server.url}/v1/models").status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 401
    key = {"authorization": "Bearer secret"}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=key).status_code == 200


def test_what_the_page_sends_is_what_the_server_knows(make_server):
    """Every setting that it offers, on a server that refuses fields it does not know."""
    server = make_server(settings=ServerSettings(strict=True))
    page = httpx.get(server.url, headers=BROWSER).text
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
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert '"completion_tokens":' in answer.text


def test_the_page_is_packaged():
    root = Path(quire.__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["quire"]
    assert any((root / "server/web/index.html") in root.glob(pattern) for pattern in patterns)
