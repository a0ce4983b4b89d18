"""/v1/responses through OpenAI's own client."""

import json
import re
import threading
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests import web
from tests.patience import WAIT_S
from tests.server.response_clients import client_of, raw
from tests.server.running import RunningServer
from tests.server.test_reasoning import THINKING_TEMPLATE
from tests.server.test_tools import WEATHER, check
from tests.server.vocabulary import JSON_PIECES, TOOL_TEMPLATE, served_model

TOOL = {"type": "function", **WEATHER["function"]}
LIFE = ("response.created", "response.in_progress")


@pytest.fixture(scope="module")
def caller() -> Iterator[RunningServer]:
    model = served_model(2048, end_ids=(0,), pieces=JSON_PIECES, template=TOOL_TEMPLATE)
    running = RunningServer(model=model, max_sequence_tokens=2048, num_pages=6000).start()
    yield running
    running.stop()


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return client_of(server)


def test_a_text_is_answered(server, client):
    found = client.responses.create(
        model="fake", instructions="be kind", input="hi", max_output_tokens=6, temperature=0
    )
    prompt = server.model.tokenizer.encode("system: be kind\nuser: hi\nassistant: ")
    assert found.output_text == server.expected_text(prompt, 6)
    (message,) = found.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(prompt), 6)
    assert found.usage.total_tokens == len(prompt) + 6
    assert (found.instructions, found.max_output_tokens, found.temperature) == ("be kind", 6, 0)
    assert found.completed_at is None


def test_an_answer_that_ends_by_itself_is_completed(server, client):
    piece = server.expected_text(server.model.tokenizer.encode("user: hi\nassistant: "), 6)[-1]
    found = client.responses.create(
        model="fake", input="hi", max_output_tokens=50, temperature=0, extra_body={"stop": [piece]}
    )
    assert found.status == "completed"
    assert found.output[0].status == "completed"
    assert found.completed_at >= found.created_at
    assert found.incomplete_details is None


def test_a_stream_says_the_same_as_a_whole_answer_and_numbers_its_events(client):
    asked = {"model": "fake", "input": "hi", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    middle = [name for name in types if name != "response.output_text.delta"]
    assert middle == [
        *LIFE, "response.output_item.added", "response.content_part.added", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage == whole.usage.model_copy(update={"input_tokens_details": last.usage.input_tokens_details})
    assert {event.response.id for event in (events[0], events[1], events[-1])} == {last.id}
    assert events[0].response.output == []


def test_the_bytes_of_a_stream_are_named_events(server):
    events = raw(server, stream=True).text.split("\n\n")
    assert events.pop() == ""
    for number, event in enumerate(events):
        name, data = event.split("\n")
        found = json.loads(data.removeprefix("data: "))
        assert (name, found["sequence_number"]) == (f"event: {found['type']}", number)


def test_log_probabilities_come_where_include_asks_for_them(client):
    asked = {"model": "fake", "input": "hi", "max_output_tokens": 4, "temperature": 0}
    assert client.responses.create(**asked).output[0].content[0].logprobs == []
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    entries = client.responses.create(**asked).output[0].content[0].logprobs
    assert len(entries) == 4
    assert all(len(entry.top_logprobs) == 1 for entry in entries)
    events = list(client.responses.create(**asked, stream=True))
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]


def test_a_call_is_an_item_and_its_result_is_taken_back(caller):
    client = client_of(caller)
    asked = {"model": "fake", "tools": [TOOL], "max_output_tokens": 1000}
    given: list = [{"role": "user", "content": "how is the weather in rome"}]
    found = client.responses.create(**asked, input=given, tool_choice="required", extra_body={"seed": 1})
    assert found.status == "completed"
    assert {item.type for item in found.output} == {"function_call"}
    for call in found.output:
        check(call.name, call.arguments)
    given += found.output
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in found.output]
    again = client.responses.create(**asked, input=given, tool_choice="required")
    assert again.usage.input_tokens > found.usage.input_tokens
    by_id = client.responses.create(**asked, input=given[-len(found.output) :], previous_response_id=found.id)
    assert by_id.usage.input_tokens == again.usage.input_tokens


def test_a_call_streams_as_the_deltas_of_its_arguments(caller):
    asked = {"model": "fake", "input": "how is the weather", "tools": [TOOL], "tool_choice": "required"}
    with client_of(caller).responses.stream(**asked, max_output_tokens=1000, extra_body={"seed": 2}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas: dict[int, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    assert deltas == {index: call.arguments for index, call in enumerate(final.output)}
    for call in final.output:
        check(call.name, call.arguments)


def test_a_conversation_with_a_call_that_was_cut_goes_on(caller):
    client = client_of(caller)
    asked = {"model": "fake", "tools": [TOOL], "extra_body": {"seed": 1}}
    cuts = [
        client.responses.create(**asked, input="how is it", tool_choice="required", max_output_tokens=size)
        for size in range(50, 70, 4)
    ]
    begun = [found for found in cuts if found.output[-1].type == "function_call"]
    assert {found.output[-1].status for found in begun} == {"incomplete"}
    for found in begun:
        after = {"role": "user", "content": "go on"}
        by_id = client.responses.create(**asked, input=[after], previous_response_id=found.id, max_output_tokens=1)
        given = [{"role": "user", "content": "how is it"}, *found.output, after]
        again = client.responses.create(**asked, input=given, max_output_tokens=1)
        assert by_id.usage.input_tokens == again.usage.input_tokens


def test_a_custom_tool_has_an_input_and_takes_its_result_back(caller):
    client = client_of(caller)
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"}
    tool = {"type": "custom", "name": "run", "description": "runs code", "format": form}
    asked = {"model": "fake", "tools": [tool], "max_output_tokens": 1000}
    found = client.responses.create(
        **asked, input="go", tool_choice="required", parallel_tool_calls=False, extra_body={"seed": 1}
    )
    (call,) = found.output
    assert (call.type, call.name) == ("custom_tool_call", "run")
    assert re.fullmatch("[a-c]{3}", call.input)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    again = client.responses.create(**asked, input=[result], previous_response_id=found.id, tool_choice="none")
    assert again.usage.input_tokens > 0
    events = list(client.responses.create(**asked, input="go", tool_choice="required", stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    done = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == "".join(done)


# As openai-agents 0.24 sends them, whose runs are loops of such requests.
AGENT_TOOL = {
    "name": "get_weather", "type": "function", "strict": True, "description": "Weather of a city.",
    "parameters": {"properties": {"city": {"title": "City", "type": "string"}}, "required": ["city"],
                   "title": "get_weather_args", "type": "object", "additionalProperties": False},
}  # fmt: skip
AGENT_FORMAT = {
    "format": {"type": "json_schema", "name": "final_output", "strict": True, "schema": {
        "properties": {"city": {"title": "City", "type": "string"}, "sunny": {"title": "Sunny", "type": "boolean"}},
        "required": ["city", "sunny"], "title": "Answer", "type": "object", "additionalProperties": False}},
}  # fmt: skip
AGENT_REQUESTS = {
    "tools": {"include": [], "input": [{"content": "how is rome", "role": "user"}], "instructions": "Use tools.",
              "tool_choice": "required", "tools": [AGENT_TOOL]},
    "a handoff": {
        "include": [], "instructions": "You speak Spanish only.", "tools": [],
        "input": [
            {"content": "hola", "role": "user"},
            {"arguments": "{}", "call_id": "call_D8", "name": "transfer_to_spanish", "type": "function_call",
             "id": "fc_be83", "status": "completed"},
            {"arguments": "{}", "call_id": "call_EC", "name": "transfer_to_spanish", "type": "function_call",
             "id": "fc_1027", "status": "completed"},
            {"call_id": "call_EC", "output": "Multiple handoffs detected, ignoring this one.",
             "type": "function_call_output"},
            {"call_id": "call_D8", "output": '{"assistant": "Spanish"}', "type": "function_call_output"},
        ],
    },
    "a format beside tools": {"include": [], "input": [{"content": "how is rome", "role": "user"}], "instructions": "a",
                              "text": AGENT_FORMAT, "tools": [AGENT_TOOL]},
    "a session": {
        "include": [], "instructions": "Be short.", "tools": [],
        "input": [
            {"content": "my name is ada", "role": "user"},
            {"id": "msg_1924", "role": "assistant", "status": "completed", "type": "message",
             "content": [{"annotations": [], "text": "good", "type": "output_text", "logprobs": []}]},
            {"content": "what is my name", "role": "user"},
        ],
    },
    "many settings": {
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "store": False, "tools": [],
        "input": [{"content": "hi", "role": "user"}], "instructions": "Be short.", "metadata": {"a": "b"},
        "prompt_cache_retention": "in_memory", "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"}, "top_logprobs": 2, "truncation": "auto",
    },
}  # fmt: skip
# As those of models that were never shown a tool: it adds texts, and a call has none.
CONCATENATING = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    model = served_model(2048, end_ids=(0,), pieces=JSON_PIECES, template=CONCATENATING)
    running = RunningServer(model=model, max_sequence_tokens=2048, num_pages=6000).start()
    yield running
    running.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", AGENT_REQUESTS)
def test_what_the_agents_sdk_sends_is_answered(caller, plain, name, stream):
    for server in (caller, plain):
        answer = raw(server, **{"model": "fake", "max_output_tokens": 30, "temperature": 0.0} | AGENT_REQUESTS[name],
                     stream=stream)  # fmt: skip
        assert answer.status_code == 200, answer.text
        ended = '"type":"response.completed"' in answer.text or '"type":"response.incomplete"' in answer.text
        assert ended == stream


class Weather(BaseModel):
    city: str
    is_fine: bool


def test_a_pydantic_model_is_followed_and_parsed(caller):
    found = client_of(caller).responses.parse(
        model="fake", input="weather", text_format=Weather, max_output_tokens=1500, extra_body={"seed": 5}
    )
    if found.status == "completed":
        assert isinstance(found.output_parsed, Weather)
    assert found.output_text.startswith("{")
    assert found.text.format.type == "json_schema"


def test_thinking_is_an_item_of_its_own():
    server = RunningServer(model=served_model(end_ids=(0,), pieces=JSON_PIECES, template=THINKING_TEMPLATE)).start()
    try:
        client = client_of(server)
        asked = {"model": "fake", "input": "open", "max_output_tokens": 5, "temperature": 0}
        found = client.responses.create(**asked, include=["reasoning.encrypted_content"])
        (item,) = found.output
        assert (item.type, item.status, item.summary) == ("reasoning", "incomplete", [])
        assert item.content[0].text
        assert found.usage.output_tokens_details.reasoning_tokens == 5
        events = list(client.responses.create(**asked, stream=True))
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == item.content[0].text
        again = client.responses.create(**asked | {"input": [*found.output, {"role": "user", "content": "open"}]})
        assert again.status == "incomplete"
    finally:
        server.stop()


def test_constraints_under_other_names_are_followed(caller):
    fields = {"max_output_tokens": 50, "input": "go"}
    for constraint in ({"regex": "(abc|bca){3}"}, {"structured_outputs": {"regex": "(abc|bca){3}"}}):
        found = raw(caller, **fields, **constraint).json()
        assert len(found["output"][0]["content"][0]["text"]) == 9
        assert found["status"] == "completed"


def test_the_tokens_of_an_input_are_counted(client):
    asked = {"model": "fake", "input": "hi", "instructions": "be kind"}
    counted = client.responses.input_tokens.count(**asked)
    assert counted.input_tokens == client.responses.create(**asked, max_output_tokens=1).usage.input_tokens


# Limits and errors


def test_a_conversation_too_long_is_refused_or_loses_its_earliest_turns(server):
    turns = [{"role": "user", "content": f"{number % 3} " + "a" * 40} for number in range(20)]
    refused = raw(server, input=turns).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")
    found = raw(server, input=turns, truncation="auto")
    assert found.status_code == 200
    prompt = found.json()["usage"]["input_tokens"]
    assert 250 < prompt <= 508
    kept = raw(server, input="b", truncation="auto", previous_response_id=found.json()["id"])
    assert kept.status_code == 200
    alone = raw(server, input="a" * 600, truncation="auto")
    assert alone.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "regex"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"include": ["everything"]}, "include[0]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"regex": "("}, "regex"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_a_wrong_field_is_named_as_this_api_names_it(server, fields, param):
    answer = raw(server, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith((param, "the prompt"))


def test_unknown_fields_are_named_wherever_they_are(server):
    item = {"role": "user", "content": "a", "colour": "red"}
    answer = raw(server, input=[item], mood="good", text={"size": 3, "verbosity": "low"}, reasoning={"depth": 3})
    names = set(answer.headers["x-quire-ignored-fields"].split(","))
    assert names == {"mood", "text.size", "text.verbosity", "reasoning.depth", "input[0].colour"}


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=msg_0", "after")]
)
def test_a_wrong_page_of_items_is_refused(server, query, param):
    found = raw(server).json()
    answer = web.get(f"{server.url}/v1/responses/{found['id']}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_stream_that_fails_ends_with_an_error_and_a_failed_response(make_server):
    steps = threading.Semaphore(3)
    server = make_server(before_result=lambda *_: steps.acquire(timeout=WAIT_S))
    try:
        events = []
        for event in client_of(server).responses.create(model="fake", input="hi", max_output_tokens=400, stream=True):
            events.append(event)
            if event.type == "response.output_item.added":
                server.loop.call_soon_threadsafe(server.service.disconnect, "the engine process ended")
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "the engine process ended" in events[-2].message
        assert events[-1].response.error.code == "server_error"
    finally:
        steps.release(1000)
