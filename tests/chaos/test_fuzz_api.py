"""Any JSON to any route: served or refused with a reason, never an error of the server's own."""

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.openai.requests import ChatRequest, CompletionRequest
from quire.server.settings import ServerSettings
from quire.server.tgi.requests import Parameters
from tests.server.running import RunningServer

FIELDS = {
    "/v1/completions": sorted(CompletionRequest.__struct_fields__),
    "/v1/chat/completions": sorted(ChatRequest.__struct_fields__),
    "/generate": sorted(Parameters.__struct_fields__),
    "/generate_stream": sorted(Parameters.__struct_fields__),
    "/tokenize": ["inputs", "add_special_tokens"],
    "/detokenize": ["ids", "skip_special_tokens"],
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
    fields = draw(st.dictionaries(st.sampled_from(FIELDS[path]), values, max_size=4))
    fields = {"max_tokens": 3, "max_new_tokens": 3} | fields  # most are to be short
    if path.startswith("/generate"):
        content = {"inputs": draw(texts | values), "parameters": fields}
    elif path == "/v1/completions":
        content = {"prompt": "ab"} | fields
    elif path == "/v1/chat/completions":
        content = {"messages": draw(messages)} | fields
    else:
        content = fields
    return path, json.dumps(content).encode()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    one = RunningServer(settings=ServerSettings(request_timeout_s=20.0)).start()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, headers={"content-type": "application/json"}, timeout=30) as one:
        yield one


@given(asked())
def test_whatever_is_asked_is_served_or_refused_with_a_reason(client, asked):
    path, content = asked
    answer = client.post(path, content=content)
    assert answer.status_code in {200, 400, 404, 413, 422}, (path, content, answer.text)
    if answer.status_code != 200:
        assert answer.json().get("error"), answer.text


def test_afterwards_all_is_well(running):
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3, "temperature": 0})
    assert answer.status_code == 200
    running.wait_until(lambda: running.service.num_streams == 0)
