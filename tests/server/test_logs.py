"""What is logged, and what never is."""

import json
import logging

import httpx
import pytest

from quire.server.logs import JsonFormatter, TextFormatter


@pytest.fixture
def records(caplog):
    """Of the server's thread."""
    caplog.set_level(logging.INFO, logger="quire")
    return caplog


def test_a_request_is_a_line_with_its_numbers_and_without_its_words(server, records):
    body = {"prompt": "secretword", "max_tokens": 5, "user": "someone\nelse"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    server.wait_until(lambda: any(record.getMessage() == "request" for record in records.records))
    (record,) = [record for record in records.records if record.getMessage() == "request"]
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(record)
        assert "\n" not in line
        assert "secretword" not in line
        assert answer["choices"][0]["text"] not in line
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["outcome"], entry["prompt_tokens"], entry["generated_tokens"]) == ("answered", 10, 5)
    assert entry["user"] == "someone\nelse"
    assert 0 <= entry["first_token_ms"] <= entry["total_ms"]


def test_an_exception_is_part_of_its_object(records):
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("quire.test").exception("it failed")
    entry = json.loads(JsonFormatter().format(records.records[-1]))
    assert (entry["level"], entry["message"]) == ("ERROR", "it failed")
    assert "ValueError: broken" in entry["exception"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "secretword"}], "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "secretword", "content": "a"}]}),
        ("/v1/completions", {"prompt": ["secretword", 5]}),
        ("/v1/completions", {"prompt": "secretword" * 100, "timings": True}),
        ("/generate", {"inputs": "secretword", "parameters": {"max_new_tokens": 3, "stop": ["secretword"]}}),
        ("/generate", {"inputs": "secretword", "parameters": {"grammar": {"type": "secretword"}}}),
        ("/generate_stream", {"inputs": "secretword", "parameters": {"max_new_tokens": 3}}),
        ("/vertex", {"instances": [{"inputs": "secretword", "stream": "secretword"}]}),
        ("/tokenize", {"inputs": "secretword"}),
    ],
)
def test_nothing_of_what_is_asked_or_refused_is_logged(server, records, path, body):
    httpx.post(server.url + path, json=body)
    server.wait_until(lambda: server.service.num_streams == 0)
    for record in records.records:
        assert "secretword" not in TextFormatter().format(record)
        assert "secretword" not in JsonFormatter().format(record)
