"""Requests exactly as clients sent them, of those that were refused or not followed once.

`make test-clients` runs the clients themselves. What is in client_requests.json was recorded there.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import web
from tests.server.running import RunningServer
from tests.server.vocabulary import END, TEMPLATE, served_model

RECORDED = json.loads((Path(__file__).parent / "client_requests.json").read_text())
# The 48 tokens that the fake samples: they spell names, numbers, JSON, sums and the marks around calls.
PIECES = [END, *"abcdefghijklmnoprstuvwxy", *"0123456789", *'{}":,_<>/+.', "Ġ", "Ċ"]


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """A model whose template adds strings, as the default model's does, and knows no tools."""
    template = TEMPLATE.replace("{{ message['content'] }}", "{{ '' + message['content'] }}")
    model = replace(served_model(4096, end_ids=(0,), pieces=PIECES, template=template), name="smollm2-135m-instruct")
    running = RunningServer(model=model, max_sequence_tokens=4096, num_pages=9000).start()
    yield running
    running.stop()


def answer_of(path: str, answer: Any) -> tuple[str, list[str]]:
    """The text of an answer and the names of its calls, whole or streamed."""
    if path == "/v1/responses":
        items = answer.json()["output"]
        parts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        return "".join(parts), [item["name"] for item in items if item["type"] == "function_call"]
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-1]
        found = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    else:
        found = [choice["message"] for choice in answer.json()["choices"]]
    calls = [call for message in found for call in message.get("tool_calls") or []]
    return "".join(message.get("content") or "" for message in found), [call["function"]["name"] for call in calls]


@pytest.mark.parametrize("request_", RECORDED, ids=lambda recorded: f"{recorded['client']}: {recorded['about']}")
def test_it_is_answered_as_its_client_expects(small, request_):
    answer = web.post(small.url + request_["path"], json=request_["body"])
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-quire-ignored-fields") == request_.get("ignored")
    text, calls = answer_of(request_["path"], answer)
    if "match" in request_:
        assert re.fullmatch(request_["match"], text)
    if "keys" in request_:
        assert list(json.loads(text)) == request_["keys"]
    if "calls" in request_:
        assert calls == request_["calls"]


HISTORIES = [recorded for recorded in RECORDED if any("tool_calls" in m for m in recorded["body"].get("messages", ()))]


@pytest.mark.parametrize("request_", HISTORIES, ids=lambda recorded: f"{recorded['client']}: {recorded['about']}")
def test_the_calls_and_results_of_its_history_reach_the_model(small, request_):
    messages = request_["body"]["messages"]
    tokens = web.post(f"{small.url}/tokenize", json={"messages": messages}).json()["tokens"]
    prompt = web.post(f"{small.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert calls
    assert results
    for call in calls:
        assert spelled(call["name"]) in prompt
        for value in json.loads(call["arguments"]).values():
            assert isinstance(value, dict | list) or spelled(str(value)) in prompt
    for result in results:
        assert spelled(result) in prompt


def spelled(text: str) -> str:
    """Without the characters that the vocabulary leaves out."""
    return "".join(letter for letter in text if letter in PIECES or letter in " \n")
