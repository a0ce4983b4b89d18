"""Log lines, and what is never logged."""

import json
import logging

import pytest

from quire.server.observe.logs import JsonFormatter, TextFormatter
from quire.server.settings import ServerSettings
from tests import web


@pytest.fixture
def records(caplog):
    """Of the server's thread."""
    caplog.set_level(logging.INFO, logger="quire")
    return caplog


def test_a_request_is_a_line_with_its_numbers_and_without_its_words(server, records):
    body = {"prompt": "secretword", "max_tokens": 5, "user": "someone\nelse"}
    answer = web.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "this-one"}).json()

    def lines() -> list[logging.LogRecord]:
        """Those of this request: the one before, of another test, may be written only now."""
        found = [record for record in records.records if record.getMessage() == "request"]
        return [record for record in found if record.request_id == "this-one"]

    server.wait_until(lambda: bool(lines()))
    (record,) = lines()
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
        ("/v1/messages", {"messages": [{"role": "user", "content": "secretword"}], "max_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "secretword"}]}], "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "secretword"}]}),
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
    web.post(server.url + path, json=body)
    server.wait_until(lambda: server.service.num_streams == 0)
    for record in records.records:
        assert "secretword" not in TextFormatter().format(record)
        assert "secretword" not in JsonFormatter().format(record)


def test_the_line_of_a_request_without_a_route_or_a_key_has_its_path_and_not_its_query(make_server, records):
    server = make_server(settings=ServerSettings(api_key="key"))
    keyed = {"authorization": "Bearer key"}
    web.get(f"{server.url}/v1/nowhere%0Afaked?token=secretword", headers=keyed)
    web.post(f"{server.url}/v1/completions?token=secretword", json={"prompt": "a"})
    web.get(f"{server.url}/{'a' * 5000}", headers=keyed)
    server.wait_until(lambda: len([one for one in records.records if one.getMessage() == "request refused"]) == 3)
    refused = [one for one in records.records if one.getMessage() == "request refused"]
    assert [(one.status, one.path) for one in refused] == [
        (404, "/v1/nowhere\nfaked"), (401, "/v1/completions"), (404, "/" + "a" * 199)
    ]  # fmt: skip
    lines = [TextFormatter().format(one) for one in refused]
    assert r'path="/v1/nowhere\nfaked"' in lines[0]
    assert not any("secretword" in line or "\n" in line for line in lines)


def test_no_client_makes_a_long_line_or_a_long_answer(make_server, records):
    """By names, values, paths and models of a megabyte."""
    long = "n" * 1_000_000
    strict = make_server(settings=ServerSettings(strict=True))
    server = make_server()
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for one in (server, strict):
        for path, body in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, long: 1}),
            ("/v1/chat/completions", chat | {long: 1}),
            ("/v1/chat/completions", chat | {"model": long}),
            ("/v1/chat/completions", chat | {"logit_bias": {long: 1}}),
            ("/v1/chat/completions", chat | {"logit_bias": {long: "a"}}),
            ("/v1/chat/completions", chat | {"max_tokens": long}),
            ("/v1/chat/completions", chat | {"chat_template_kwargs": {long: [long]}, "tool_choice": long}),
            ("/v1/chat/completions", chat | {"messages": [{"role": long, "content": long}]}),
            ("/v1/messages", chat | {long: 1}),
            ("/v1/messages", chat | {"messages": [{"role": "user", "content": [{"type": long, long: long}]}]}),
            (
                "/v1/messages",
                chat | {"messages": [{"role": "user", "content": [{"type": "text", "text": "", long: 1}]}]},
            ),
            ("/v1/messages", chat | {"tools": [{"name": "a", "input_schema": {}, long: 1, "type": long}]}),
            ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1, long: 1}}),
            ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": long}}}),
            ("/vertex", {"instances": [{"inputs": "a", long: 1, "parameters": {"max_new_tokens": 1}}]}),
            ("/vertex", {"instances": [{"inputs": "a", "stream": long}]}),
            ("/v2/models/fake/versions/1/infer", {"id": long, "inputs": [{long: 1}], "outputs": [{long: 1}]}),
        ):
            answer = web.post(one.url + path, json=body)
            assert len(answer.content) < 5000, (path, answer.status_code)
            assert sum(len(name) + len(value) for name, value in answer.headers.items()) < 5000, path
        assert len(web.get(f"{one.url}/v1/models/{long[:60_000]}").content) < 5000
        assert len(web.put(f"{one.url}/v1/models/{long[:60_000]}").content) < 5000
    assert records.records
    for record in records.records:
        assert len(TextFormatter().format(record)) < 10_000, record.msg
        assert len(record.getMessage()) < 5000, record.msg


def test_a_long_message_keeps_its_ends(records):
    try:
        raise ValueError("v" * 100_000)
    except ValueError:
        logging.getLogger("quire.test").exception("begin%send", "x" * 100_000, extra={"user": "u" * 100_000})
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(records.records[-1])
        found = len(line), "begin" in line, " characters " in line
        assert found == (min(found[0], 20_000), True, True)
