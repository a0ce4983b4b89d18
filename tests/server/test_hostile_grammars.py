"""Requests whose grammars, tools or nested JSON are made to stall the server or to make it fail."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests import web
from tests.server.loop_time import MeasuredLoop
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, TEMPLATE, served_model

MESSAGES = [{"role": "user", "content": "go"}]
CHAT = {"messages": MESSAGES, "max_tokens": 3}
MAX_LOOP_S = 0.2  # of processor time, within which every other request is looked at
DEEP = '{"a":' * 3000 + "1" + "}" * 3000
DIGITS = "a{" + "9" * 5000 + "}"


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    one = RunningServer(loop_factory=MeasuredLoop, model=served_model(end_ids=(0,), pieces=JSON_PIECES)).start()
    yield one
    one.stop()


@pytest.fixture(scope="module")
def with_tools() -> Iterator[RunningServer]:
    """Its template reads tools."""
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
    one = RunningServer(loop_factory=MeasuredLoop, model=served_model(8192, (0,), JSON_PIECES, template)).start()
    yield one
    one.stop()


def measured(running: RunningServer) -> float:
    """The most processor time that the loop gave to one thing since this was last asked."""
    assert isinstance(running.loop, MeasuredLoop)
    return running.loop.take_longest_s()


def refusal(running: RunningServer, path: str, body: dict[str, Any]) -> str:
    """The message of a 4xx; what the event loop did for it is bounded, and the server is well afterwards."""
    measured(running)
    answer = web.post(f"{running.url}{path}", json=body)
    assert answer.status_code in (400, 422), answer.text[:500]
    assert web.get(f"{running.url}/health").status_code == 200
    assert measured(running) < MAX_LOOP_S
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert len(message) < 1000
    return str(message).removeprefix("instances[0]: ")


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("piece", ["\\p{", "{1", "[a-", "(", "(a?){9}"])
def test_a_long_regular_expression_does_not_hold_up_the_event_loop(running: RunningServer, piece: str) -> None:
    pattern = piece * (255_000 // len(piece))
    asked = {"type": "regex", "value": pattern}
    assert refusal(running, "/v1/chat/completions", CHAT | {"response_format": asked}).startswith("response_format")
    message = refusal(running, "/generate", {"inputs": "go", "parameters": {"grammar": asked}})
    assert message.startswith("grammar")
    tools = [tool({"properties": {"x": {"type": "string", "pattern": pattern}}})]
    assert refusal(running, "/v1/chat/completions", CHAT | {"tools": tools}).startswith("tools[0].function.parameters")


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "(" * 60_000,
        "root ::= " + '("a" | "b")? ' * 5_000,
        "root ::= " + "(" * 900 + '"a"' + ")*" * 900,
        'root ::= root root | "a" | ""',
        "\n".join(f'r{n} ::= r{n + 1} r{n + 1} | "a"' for n in range(40)) + '\nr40 ::= "b"\nroot ::= r0',
        "start: " + "/a/ " * 16_000,
        "start: " + "(" * 20_000,
        'start: x{1000}\nx: y{1000}\ny: "' + "a" * 4000 + '"',
        "start: " + " ".join(f"/.*a.{{{n}}}/" for n in range(100)),
        "start: %json " + '{"allOf": [' * 500,
        "start: T\nT: " + " & ".join(f"/.*a.{{{n}}}/" for n in range(30)),
    ],
)
def test_hostile_rules_are_answered_or_refused_and_the_server_is_well(running: RunningServer, grammar: str) -> None:
    measured(running)
    for field in ("guided_grammar", "grammar"):
        answer = web.post(f"{running.url}/v1/chat/completions", json=CHAT | {field: grammar})
        assert answer.status_code in (200, 400, 500), answer.text[:500]
        if answer.status_code != 200:
            assert len(answer.json()["error"]["message"]) < 1000
    assert web.get(f"{running.url}/health").status_code == 200
    assert measured(running) < MAX_LOOP_S
    well = web.post(f"{running.url}/v1/chat/completions", json=CHAT | {"guided_choice": ["ab"]})
    assert well.json()["choices"][0]["message"]["content"] == "ab"


def test_the_schemas_of_tools_have_a_limit_together(running: RunningServer) -> None:
    body = CHAT | {"tools": [tool({"enum": ["y" * 1000] * 1800})]}
    message = refusal(running, "/v1/chat/completions", body)
    assert message.startswith("tools[0].function.parameters has ")
    assert "the limit is 262144" in message
    body = CHAT | {"tools": [tool({"enum": ["y" * 1000] * 100}, f"f{number}") for number in range(3)]}
    message = refusal(running, "/v1/chat/completions", body)
    assert message.startswith("tools[2].function.parameters brings the schemas of all tools to ")
    assert "the limit is 262144" in message


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"type": "regex", "value": DIGITS}, "{}"),
        ({"type": "regex", "value": "a" + "{999}" * 1500}, "{}"),
        ({"type": "regex", "value": "\\"}, "{}"),
        ({"type": "json", "value": {"pattern": "a{" + "9" * 4001 + "}"}}, "{}.pattern"),
        ({"type": "json", "value": DEEP}, "{}.value"),
        ({"type": "json", "value": '{"const": "\\ud800"}'}, "{}.value"),
        ({"type": "json", "value": '{"const": ' + "9" * 5000 + "}"}, "{}.value"),
        ({"type": "json", "value": "[" * 1_900_000}, "{}.value"),
        ({"type": "json_schema", "json_schema": {"schema": DEEP}}, "{}.json_schema.schema"),
        ({"type": "json_schema", "value": {"schema": DEEP}}, "{}.value.schema"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused_by_its_name(
    running: RunningServer, asked: dict[str, Any], name: str
) -> None:
    generate = {"inputs": "go", "parameters": {"grammar": asked}}
    infer = {
        "id": "1",
        "inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [103, 111]}],
        "outputs": [{"name": "y"}],
        "parameters": {"grammar": asked},
    }
    for path, body, field in (
        ("/v1/chat/completions", CHAT | {"response_format": asked}, "response_format"),
        ("/v1/completions", {"prompt": "go", "response_format": asked}, "response_format"),
        ("/generate", generate, "grammar"),
        ("/vertex", {"instances": [generate]}, "grammar"),
        ("/v2/models/fake/versions/1/infer", infer, "grammar"),
    ):
        assert refusal(running, path, body).startswith(name.format(field))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"function": {"name": "f", "arguments": DEEP}}, "messages[1].tool_calls[0].function.arguments: nested deeper"),
        ({"function": {"name": "f", "arguments": "{" * 500_000}}, "messages[1].tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}, "messages[1].tool_calls[0].function.arguments"),
        ({"function": {"name": "f", "arguments": '{"a": ' + "9" * 5000 + "}"}}, "messages[1].tool_calls[0].function"),
        ({"function": None}, "messages[1].tool_calls[0] is no call"),
        (3, "messages[1].tool_calls[0] is no call"),
    ],
)
def test_a_call_that_cannot_be_read_is_refused_by_its_name(
    running: RunningServer, with_tools: RunningServer, call: Any, why: str
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}]
    body = CHAT | {"messages": messages}
    assert refusal(running, "/v1/chat/completions", body).startswith(why)
    assert refusal(with_tools, "/v1/chat/completions", body | {"tools": [tool({})]}).startswith(why)
    assert refusal(running, "/vertex", {"instances": [body]}).startswith(why)


def test_calls_that_are_no_list_are_refused(running: RunningServer) -> None:
    for calls in (3, "f", {"a": 1}, [3], [{"function": 3}]):
        messages = [{"role": "assistant", "content": "x", "tool_calls": calls}]
        for tools in ([], [tool({})]):
            message = refusal(running, "/v1/chat/completions", CHAT | {"messages": messages, "tools": tools})
            assert re.match(r"messages\[0\]\.tool_calls(\[0\])? is ", message)
    parts = [{"role": "system", "content": [1]}]
    message = refusal(running, "/v1/chat/completions", CHAT | {"messages": parts, "tools": [tool({})]})
    assert message.startswith("messages[0].content[0].type is 1")


def test_a_long_key_in_a_message_does_not_hold_up_the_event_loop(running: RunningServer) -> None:
    message = {"role": "user", "content": "go", "k" * 900_000: [0] * 400_000}
    measured(running)
    answer = web.post(f"{running.url}/v1/chat/completions", json=CHAT | {"messages": [message]})
    assert answer.status_code == 200, answer.text
    assert measured(running) < MAX_LOOP_S


def test_long_tools_that_a_template_writes_out_do_not_hold_up_the_event_loop(with_tools: RunningServer) -> None:
    tools = [tool({}) | {"function": {"name": "f", "description": "d" * 1_500_000}}]
    assert "tokens" in refusal(with_tools, "/v1/chat/completions", CHAT | {"tools": tools})


def test_schemas_written_as_text_work(running: RunningServer) -> None:
    schema = json.dumps({"enum": ["ab", "cd"]})
    body = {"inputs": "go", "parameters": {"grammar": {"type": "json", "value": schema}, "max_new_tokens": 9}}
    answer = web.post(f"{running.url}/generate", json=body)
    assert json.loads(answer.json()["generated_text"]) in ("ab", "cd")
