"""Any JSON to any route: served or refused with a reason, never an error of the server's own."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.tgi.requests import Parameters, TokenizeRequest
from quire.server.api.tgi.tokenize import DetokenizeRequest, PromptTokenizeRequest
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer

MAX_CPU_S = 5.0  # of this process, client and server, for one request; most take milliseconds
# What each route takes; a small body that it serves.
FIELDS = {
    "/v1/completions": CompletionRequest.__struct_fields__,
    "/v1/chat/completions": ChatRequest.__struct_fields__,
    "/generate": Parameters.__struct_fields__,
    "/generate_stream": Parameters.__struct_fields__,
    "/tokenize": (*TokenizeRequest.__struct_fields__, *PromptTokenizeRequest.__struct_fields__),
    "/chat_tokenize": ChatRequest.__struct_fields__,
    "/detokenize": DetokenizeRequest.__struct_fields__,
}
SMALL = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3},
    "/generate": {"inputs": "ab", "parameters": {"max_new_tokens": 3}},
    "/generate_stream": {"inputs": "ab", "parameters": {"max_new_tokens": 3}},
    "/tokenize": {"inputs": "ab"},
    "/chat_tokenize": {"messages": [{"role": "user", "content": "ab"}]},
    "/detokenize": {"tokens": [1, 2]},
}
numbers = st.sampled_from([-1, 0, 1, 2, 3, 7, 20, 1024, 2**31, 2**63, 2**64, -(2**63), 0.0, 0.5, 1.0, 1e-300, 1e300])
texts = st.sampled_from(
    ["", "a", "abc", "auto", "none", "json_object", "user", "\x00", "\ud800", "é", "x" * 300]
) | st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            texts | st.sampled_from(["type", "role", "content", "function", "name", "0", "1"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool", "x"]), "content": values}),
    max_size=3,
)


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(FIELDS)))
    fields = draw(st.dictionaries(st.sampled_from(sorted(FIELDS[path])), values, max_size=4))
    content: dict[str, Any] = SMALL[path]  # most answers are to be short
    if "parameters" in content:
        content = {"inputs": draw(texts | values), "parameters": content["parameters"] | fields}
    elif "messages" in content:
        content = content | {"messages": draw(messages)} | fields
    elif path == "/tokenize":
        content = draw(st.sampled_from([content, {}])) | fields
    else:
        content = content | fields
    return path, json.dumps(content).encode()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    one = RunningServer(settings=ServerSettings(request_timeout_s=WAIT_S)).start()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[httpx.Client]:
    with web.Client(base_url=running.url, headers={"content-type": "application/json"}) as one:
        yield one


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_the_small_body_is_served_and_every_field_is_one_of_its_route(path):
    """Else what is made of them is refused for that alone."""
    running = RunningServer(settings=ServerSettings(strict=True)).start()
    try:
        small = SMALL[path]
        assert web.post(running.url + path, json=small).status_code == 200
        for field in FIELDS[path]:
            body = small | {field: None}
            if "parameters" in small:
                body = small | {"parameters": small["parameters"] | {field: None}}
            elif path == "/tokenize" and field not in TokenizeRequest.__struct_fields__:
                body = {"prompt": "ab"} | {field: None}
            assert "is not a field" not in web.post(running.url + path, json=body).text
    finally:
        running.stop()


@given(asked())
def test_whatever_is_asked_is_served_or_refused_with_a_reason(client, asked):
    path, content = asked
    begun_s = time.process_time()
    answer = client.post(path, content=content)
    took_s = time.process_time() - begun_s
    assert took_s < MAX_CPU_S, (path, content)
    assert answer.status_code in {200, 400, 404, 413, 422}, (path, content, answer.text)
    if answer.status_code != 200:
        assert answer.json().get("error"), answer.text


def test_afterwards_all_is_well(running):
    answer = web.post(f"{running.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3, "temperature": 0})
    assert answer.status_code == 200
    running.wait_until(lambda: running.service.num_streams == 0)
