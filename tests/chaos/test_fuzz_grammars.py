"""Any grammar, tool or stop string to the routes that take one: served or refused, and the server stays well."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, served_model
from tests.text.grammar_fuzzing import ANYTHING, objects, patterns, repeated, schema_texts, schemas

MESSAGES = [{"role": "user", "content": "go"}]
FORMATS = st.one_of(
    st.builds(lambda pattern: {"type": "regex", "value": pattern}, patterns),
    st.builds(lambda schema: {"type": "json", "value": schema}, schemas | schema_texts),
    st.builds(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}, schemas | schema_texts),
    st.dictionaries(st.sampled_from(["type", "value", "json_schema"]), ANYTHING, max_size=3),
)
STOPS = st.lists(repeated(st.text("ab-", max_size=5)) | st.sampled_from(["", "-" * 200_000 + "b", "\x00"]), max_size=18)
TOOLS = st.lists(
    st.builds(
        lambda name, parameters: {"type": "function", "function": {"name": name, "parameters": parameters}},
        st.sampled_from(["f", "g", "h", ""]),
        objects | ANYTHING,
    ),
    max_size=3,
)
CALLS = st.lists(
    st.builds(lambda arguments: {"function": {"name": "f", "arguments": arguments}}, schema_texts | ANYTHING)
    | ANYTHING,
    max_size=2,
)


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(["format", "stop", "tools", "calls"]))
    if kind == "tools":
        return "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "tools": draw(TOOLS)}
    if kind == "calls":
        messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": draw(CALLS)}]
        return "/v1/chat/completions", {"messages": messages, "max_tokens": 3, "tools": draw(TOOLS)}
    named = {"stop": draw(STOPS)} if kind == "stop" else {}
    path = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate", "/vertex"]))
    if path in ("/generate", "/vertex"):
        named |= {"grammar": draw(FORMATS)} if kind == "format" else {}
        body: dict[str, Any] = {"inputs": "ab", "parameters": {"max_new_tokens": 3} | named}
        return path, body if path == "/generate" else {"instances": [body]}
    named |= {"response_format": draw(FORMATS)} if kind == "format" else {}
    prompt = {"messages": MESSAGES} if path == "/v1/chat/completions" else {"prompt": "ab"}
    return path, prompt | {"max_tokens": 3} | named


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    model = served_model(end_ids=(0,), pieces=JSON_PIECES)
    running = RunningServer(model=model, settings=ServerSettings(request_timeout_s=WAIT_S)).start()
    with web.Client(base_url=running.url, headers={"content-type": "application/json"}) as one:
        yield one
    running.wait_until(lambda: running.service.num_streams == 0)
    running.stop()


@settings(max_examples=settings.default.max_examples // 2)
@given(asked())
def test_whatever_grammar_is_asked_for_the_server_answers_and_is_well(
    client: httpx.Client, asked: tuple[str, dict[str, Any]]
) -> None:
    path, body = asked
    answer = client.post(path, content=json.dumps(body).encode())
    # The fifty tokens of this model cannot spell every text that a grammar may ask for, and a mask may take too long.
    is_unspeakable = "grammar cannot be followed any further" in answer.text or "a token took longer" in answer.text
    allowed = {200, 400, 413, 422, *((424, 500) if is_unspeakable else ())}
    assert answer.status_code in allowed, (path, str(body)[:1000], answer.text[:1000])
    if answer.status_code != 200:
        assert answer.json()["error"]
        assert len(answer.text) < 2000
    assert client.get("/health").status_code == 200
