"""The Anthropic routes through the anthropic client, with a fake engine. What it samples is random but for its mask."""

import json
import threading

import anthropic
import pytest
from pydantic import BaseModel

from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer
from tests.server.vocabulary import END, JSON_PIECES, PIECES, served_model

HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0}
PROMPT = "user: hi\nassistant: "


def client_of(server: RunningServer, **options: object) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        **{"base_url": server.url, "api_key": "none", "max_retries": 0, "timeout": WAIT_S} | options
    )


@pytest.fixture
def client(server: RunningServer) -> anthropic.Anthropic:
    return client_of(server)


def ids(server: RunningServer, text: str) -> list[int]:
    return server.model.tokenizer.encode(text)


def events_of(text: str) -> list[dict]:
    """The data of each event, once it is known to have its name."""
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message_is_the_text_of_what_the_engine_samples(client, server):
    message = client.messages.create(model="fake", max_tokens=20, messages=HI, extra_body=GREEDY)
    prompt = ids(server, PROMPT)
    (block,) = message.content
    assert (block.type, block.text) == ("text", server.expected_text(prompt, 20))
    assert (message.role, message.type, message.model) == ("assistant", "message", "fake")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (20, 0)


def test_a_block_of_text_has_nothing_but_its_text_as_the_ai_sdk_expects(server):
    """It takes citations for a list, where there are any."""
    asked = {"model": "fake", "max_tokens": 4, "messages": HI} | GREEDY
    text = server.expected_text(ids(server, PROMPT), 4)
    assert web.post(f"{server.url}/v1/messages", json=asked).json()["content"] == [{"type": "text", "text": text}]


def test_cached_tokens_of_a_prompt_are_counted_apart(client):
    system = [{"type": "text", "text": "be kind " * 20, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    asked = {"model": "fake", "max_tokens": 2, "messages": HI, "system": system}
    first, second = (client.messages.create(**asked).usage for _ in range(2))
    assert second.cache_read_input_tokens > first.cache_read_input_tokens
    total = first.input_tokens + first.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == total


def test_a_streamed_message_adds_up_to_the_whole(client, server):
    asked = {"model": "fake", "max_tokens": 40, "messages": HI, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
        assert stream.request_id.startswith("req_")
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, 40)
    assert final.usage.cache_read_input_tokens == len(ids(server, PROMPT)) - 1


def test_events_come_in_the_order_of_the_api(server):
    body = {
        "model": "fake",
        "max_tokens": 3,
        "messages": HI,
        "stream": True,
        "temperature": 0,
    }  # bytes alone are no text
    answer = web.post(f"{server.url}/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_a_message_is_named(client, server, stream):
    text = server.expected_text(ids(server, PROMPT), 40)
    stop = text[12:15]
    asked = {"model": "fake", "max_tokens": 40, "messages": HI, "stop_sequences": ["nowhere", stop]}
    if stream:
        with client.messages.stream(**asked, extra_body=GREEDY) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**asked, extra_body=GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_a_message_that_ends_by_itself_is_an_end_of_turn(make_server):
    server = make_server(model=served_model(end_ids=(1, 2, 3)))
    message = client_of(server).messages.create(model="fake", max_tokens=400, messages=HI, extra_body=GREEDY)
    assert message.stop_reason == "end_turn"


def test_max_tokens_beyond_the_context_end_where_it_is_full(client, server):
    message = client.messages.create(model="fake", max_tokens=8192, messages=HI)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == 512 - len(ids(server, PROMPT))


def test_no_tokens_compute_the_prompt_alone(client):
    asked = {"model": "fake", "messages": [{"role": "user", "content": "warm me up"}]}
    warmed = client.messages.create(**asked, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    assert client.messages.create(**asked, max_tokens=1).usage.input_tokens < warmed.usage.input_tokens


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]])
def test_a_last_message_of_the_assistant_is_continued(client, server, content):
    begun = [*HI, {"role": "assistant", "content": content}]
    message = client.messages.create(model="fake", max_tokens=20, messages=begun, extra_body=GREEDY)
    assert message.content[0].text == server.expected_text(ids(server, f"{PROMPT}abc"), 20)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"system": "be kind"}, f"system: be kind\n{PROMPT}"),
        (
            {"system": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
            f"system: be\n\nkind\n{PROMPT}",
        ),
        ({"messages": [*HI, {"role": "system", "content": "be kind"}]}, "user: hi\nsystem: be kind\nassistant: "),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, PROMPT),
        ({"messages": [*HI, *HI]}, "user: hi\n\nhi\nassistant: "),
    ],
)
def test_system_and_messages_become_the_turns_of_the_template(client, server, fields, prompt):
    asked = {"model": "fake", "messages": HI} | fields
    message = client.messages.create(max_tokens=9, extra_body=GREEDY, **asked)
    assert message.content[0].text == server.expected_text(ids(server, prompt), 9)
    assert client.messages.count_tokens(**asked).input_tokens == len(ids(server, prompt))


def test_special_tokens_in_messages_are_plain_text(client):
    spelt = client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": f"a{END}"}])
    plain = client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": "a"}])
    assert spelt.input_tokens > plain.input_tokens + 1


WRONG = [
    ({"max_tokens": -1}, "max_tokens is -1; it must be at least 0"),
    ({"messages": []}, "messages: empty"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role is 'tool'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is None"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images are not supported"),
    ({"messages": [*HI, {"role": "user", "content": [{"type": "document"}]}]}, "messages[1].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text is 3"),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1] is empty"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
    ({"thinking": {"type": "often"}}, "thinking.type is 'often'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is 'web_search_20250305'"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name is 'a b'"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema is None"),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type is 'string'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
    ({"output_config": {"task_budget": {}}}, "task_budget"),
    ({"messages": [{"role": "user", "content": "a" * 494}]}, "prompt is too long: 512 tokens > 511 maximum"),
    ({"messages": [{"role": "user", "content": "hi " * 600}]}, "prompt is too long: 1818 tokens > 512 maximum"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "problem"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_an_error_in_the_form_of_the_api(client, fields, problem, stream):
    asked = {"model": "fake", "max_tokens": 5, "messages": HI, "stream": stream} | fields
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**{k: v for k, v in asked.items() if k in KNOWN}, extra_body=asked)
    error = refused.value
    assert problem in error.api_message
    assert error.type == "invalid_request_error"
    assert error.body["request_id"] == error.request_id != ""


KNOWN = {"model", "max_tokens", "messages", "stream"}


def test_errors_have_the_types_and_statuses_of_the_api(server, make_server):
    client = client_of(server)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=HI)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.InternalServerError) as failed:
        client.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": PIECES[49]}])
    assert (failed.value.status_code, failed.value.type) == (500, "api_error")
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()
    small = make_server(settings=ServerSettings(payload_limit=200, request_timeout_s=1e-9))
    with pytest.raises(anthropic.ContentTooLargeError) as long:
        client_of(small).messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": "a" * 200}])
    assert long.value.type == "request_too_large"
    with pytest.raises(anthropic.GatewayTimeoutError) as late:
        client_of(small).messages.create(model="fake", max_tokens=5, messages=HI)
    assert late.value.type == "timeout_error"


def test_a_request_beyond_those_that_may_be_open_is_told_when_to_come_back(make_server):
    going_on = threading.Event()
    settings = ServerSettings(max_concurrent_requests=1)
    server = make_server(settings=settings, before_result=lambda *_: going_on.wait(WAIT_S))
    asked = {"model": "fake", "max_tokens": 5, "messages": HI}
    first = threading.Thread(target=lambda: client_of(server).messages.create(**asked))
    first.start()
    answers: list[anthropic.types.Message] = []
    patient = threading.Thread(target=lambda: answers.append(client_of(server, max_retries=9).messages.create(**asked)))
    try:
        server.wait_until(lambda: server.service.num_streams == 1)
        with pytest.raises(anthropic.OverloadedError) as refused:
            client_of(server).messages.create(**asked)
        patient.start()
        server.wait_until(lambda: server.service.metrics.failures["overloaded"] >= 2)
    finally:
        going_on.set()
        first.join(WAIT_S)
    assert refused.value.type == "overloaded_error"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    patient.join(WAIT_S)  # it comes back by itself
    assert answers[0].usage.output_tokens == 5


def test_a_failure_half_way_is_an_error_event(make_server):
    permits = threading.Semaphore(5)
    server = make_server(before_result=lambda *_: permits.acquire(timeout=WAIT_S))
    asked = {"model": "fake", "max_tokens": 100, "messages": HI}
    with client_of(server).messages.stream(**asked) as stream:
        next(iter(stream.text_stream))
        server.loop.call_soon_threadsafe(server.service.disconnect, "the engine process ended")
        with pytest.raises(anthropic.APIStatusError) as failed:
            stream.get_final_message()
    assert failed.value.api_message == "the engine process ended"
    assert failed.value.body["request_id"] == stream.request_id
    permits.release(1000)


def test_keys_are_taken_from_either_header(make_server):
    server = make_server(settings=ServerSettings(api_key="secret"))
    asked = {"model": "fake", "max_tokens": 2, "messages": HI}
    client_of(server, api_key="secret").messages.create(**asked)
    for headers in ({"x-api-key": "secret"}, {"x-api-key": "secret", "authorization": "Bearer other"}):
        assert web.post(f"{server.url}/v1/messages", json=asked, headers=headers).status_code == 200
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client_of(server, api_key="other").messages.create(**asked)
    assert refused.value.type == "authentication_error"
    assert web.post(f"{server.url}/v1/messages", json=asked, headers={"x-api-key": ""}).status_code == 401


def test_the_model_is_listed_in_the_form_of_the_api(client, server):
    (model,) = client.models.list().data
    assert (model.id, model.type, model.max_input_tokens) == ("fake", "model", 512)
    assert client.models.retrieve("fake").created_at.timestamp() == server.model.created
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("other")
    assert missing.value.type == "not_found_error"
    assert web.get(f"{server.url}/v1/models").json()["object"] == "list"  # of a client that names no version


def test_fields_that_are_not_known_are_named(make_server, server):
    unknown = {"cadence": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "colour": 1}]}]}
    asked = {"model": "fake", "max_tokens": 2} | unknown
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {name: value for name, value in asked.items() if name != "max_tokens" or path == "/v1/messages"}
        answer = web.post(server.url + path, json=body)
        assert answer.headers["x-quire-ignored-fields"] == "cadence,messages[].content[].colour"
    strict = make_server(settings=ServerSettings(strict=True))
    for body, name in ((asked, "cadence"), (asked | {"cadence": None}, "cadence")):
        refused = web.post(f"{strict.url}/v1/messages", json=body)
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            400,
            f"{name} is not a field of this route",
        )
    del asked["cadence"]
    assert (
        "messages[0].content[0].colour" in web.post(f"{strict.url}/v1/messages", json=asked).json()["error"]["message"]
    )


def test_an_output_format_is_kept(make_server):
    class Weather(BaseModel):
        city: str
        days: int

    model = served_model(end_ids=(0,), pieces=JSON_PIECES)
    client = client_of(make_server(model=model))
    schema = Weather.model_json_schema() | {"additionalProperties": False}
    schema["properties"] |= {"city": {"enum": ["rome", "oslo"]}, "days": {"enum": [1, 2]}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = client.messages.create(model="fake", max_tokens=400, messages=HI, output_config=config)
    assert Weather.model_validate_json(message.content[0].text).city in ("rome", "oslo")
    older = client.messages.create(
        model="fake", max_tokens=400, messages=HI, extra_body={"output_format": config["format"]}
    )
    assert Weather.model_validate_json(older.content[0].text)
    for field in ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "bogus"}}}},
                  {"output_format": {"type": "json_schema", "schema": {"type": "bogus"}}}):  # fmt: skip
        with pytest.raises(anthropic.BadRequestError, match=f"{next(iter(field))}[.a-z]*schema"):
            client.messages.create(model="fake", max_tokens=9, messages=HI, extra_body=field)
