"""Tools of the Anthropic API, through its client. What the fake samples is random but for its mask."""

import json
from typing import Literal

import anthropic
import pytest

from tests import web
from tests.server.running import RunningServer
from tests.server.test_messages import GREEDY, client_of, events_of, ids

WEATHER = {
    "name": "weather",
    "description": "the weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["rome", "oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 5}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
ASKED = "how is the weather in rome"
VARIANTS = (1, 3, 4, 5)  # with these the fake makes a few calls and ends
ASK = [{"role": "user", "content": ASKED}]


@pytest.fixture
def client(caller: RunningServer) -> anthropic.Anthropic:
    return client_of(caller)


def check(block: anthropic.types.ToolUseBlock) -> None:
    if block.name == "weather":
        assert set(block.input) == {"city", "days"}
        assert block.input["city"] in ("rome", "oslo")
        assert 1 <= block.input["days"] <= 5
    else:
        assert (block.name, block.input) == ("now", {})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_message_that_must_use_a_tool_does(client, choice):
    for number in VARIANTS:
        message = client.messages.create(
            model="fake", max_tokens=1000, messages=[{"role": "user", "content": f"{ASKED} {number}"}],
            tools=[WEATHER, NOW], tool_choice=choice, extra_body=GREEDY,
        )  # fmt: skip
        assert message.stop_reason == "tool_use"
        assert len({block.id for block in message.content}) == len(message.content) > 0
        for block in message.content:
            assert block.type == "tool_use"
            assert block.id.startswith("toolu_")
            assert block.name == choice.get("name", block.name)
            check(block)


def test_names_of_tools_may_be_as_long_as_those_of_other_servers(client):
    """Tools of other servers have the server's name in theirs, and Anthropic takes 128 characters."""
    asked = {"model": "fake", "messages": ASK}
    for size in (128, 129):
        tools = [NOW | {"name": "n" * size}]
        if size == 128:
            assert client.messages.count_tokens(**asked, tools=tools).input_tokens > 128
        else:
            with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.name is 'nnn"):
                client.messages.count_tokens(**asked, tools=tools)


def test_one_call_is_made_where_several_are_not_allowed(client):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for number in range(6):
        message = client.messages.create(
            model="fake", max_tokens=1000, messages=[{"role": "user", "content": f"{ASKED} {number}"}],
            tools=[WEATHER, NOW], tool_choice=choice,
        )  # fmt: skip
        assert len(message.content) == 1


def test_no_tool_is_used_where_none_may_be(client, caller):
    message = client.messages.create(
        model="fake", max_tokens=30, messages=ASK, tools=[WEATHER], tool_choice={"type": "none"}, extra_body=GREEDY
    )
    prompt = ids(caller, f"user: {ASKED}assistant: ")
    assert message.content[0].text == caller.model.tokenizer.decode(caller.expected(prompt, 30, end_ids=(0,)))


def test_the_clients_own_accumulation_of_a_stream_is_the_message(client):
    for number in VARIANTS:
        asked = {
            "model": "fake", "max_tokens": 1000, "messages": [{"role": "user", "content": f"{ASKED} {number}"}],
            "tools": [WEATHER, NOW], "tool_choice": {"type": "any"}, "extra_body": GREEDY,
        }  # fmt: skip
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert "input_json" in kinds or all(block.name == "now" for block in final.content)
        assert [(b.name, b.input) for b in final.content] == [(b.name, b.input) for b in whole.content]
        assert final.stop_reason == whole.stop_reason == "tool_use"


def test_each_call_is_a_block_of_its_own_in_the_stream(caller):
    body = {
        "max_tokens": 1000, "messages": [{"role": "user", "content": f"{ASKED} 3"}], "tools": [WEATHER, NOW],
        "tool_choice": {"type": "any"}, "stream": True, **GREEDY,
    }  # fmt: skip
    events = events_of(web.post(f"{caller.url}/v1/messages", json=body).text)
    blocks = [event for event in events if event["type"].startswith("content_block")]
    open_block = None
    for event in blocks:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block, written = event["index"], ""
            assert event["content_block"]["input"] == {}
        elif event["type"] == "content_block_delta":
            assert (event["index"], event["delta"]["type"]) == (open_block, "input_json_delta")
            written += event["delta"]["partial_json"]
        else:
            assert isinstance(json.loads(written), dict)
            open_block = None
    assert open_block is None
    assert [event["index"] for event in blocks if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_is_cut_off_has_the_fields_that_are_complete(client):
    asked = {
        "model": "fake", "messages": ASK, "tools": [WEATHER], "extra_body": GREEDY,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = client.messages.create(**asked, max_tokens=1000)
    assert whole.content[0].name == "weather"
    seen = set()
    for max_tokens in range(1, min(whole.usage.output_tokens, 80)):
        message = client.messages.create(**asked, max_tokens=max_tokens)
        assert message.stop_reason == "max_tokens"
        calls = [block for block in message.content if block.type == "tool_use"]
        for cut, complete in zip(calls, whole.content, strict=False):
            assert cut.name == complete.name
            assert cut.input.items() <= complete.input.items()
            seen.add(tuple(cut.input))
    assert {(), ("city",), ("city", "days")} <= seen


def test_results_of_tools_go_back_into_the_conversation(client, caller):
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "rome", "days": 1}}
    said = [{"type": "thinking", "thinking": "hm", "signature": "any"}, {"type": "text", "text": "let me see"}, call]
    for content, shown in (
        ("sunny", "sunny"),
        ([{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}], "sunny"),
        ([], ""),
    ):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        conversation = [
            *ASK,
            {"role": "assistant", "content": said},
            {"role": "user", "content": [result, {"type": "text", "text": "thanks"}]},
        ]
        prompt = f"user: {ASKED}assistant: let me see<tool_call>weather rometool: {shown}user: thanksassistant: "
        counted = client.messages.count_tokens(model="fake", messages=conversation)
        assert counted.input_tokens == len(ids(caller, prompt))
        message = client.messages.create(model="fake", max_tokens=9, messages=conversation, extra_body=GREEDY)
        expected = caller.expected(ids(caller, prompt), 9, end_ids=(0,))
        assert "".join(block.text for block in message.content) == caller.model.tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        (
            [{"type": "tool_result", "tool_use_id": "a", "content": ""}],
            r"messages\[2\].content\[0\].tool_use_id is 'a'",
        ),
        ([{"type": "tool_result", "tool_use_id": "toolu_1", "content": 5}], r"messages\[2\].content\[0\].content is 5"),
        (
            [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image"}]}],
            r"messages\[2\].content\[0\].content\[0\].type is 'image'; images are not supported",
        ),
        ([{"type": "tool_use", "id": "a", "name": "b", "input": {}}], "it can be text, tool_result"),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}], "it can be text, tool_result"),
    ],
)
def test_a_wrong_result_is_refused_by_its_place(client, blocks, problem):
    call = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    conversation = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": blocks}]
    with pytest.raises(anthropic.BadRequestError, match=problem):
        client.messages.create(model="fake", max_tokens=9, messages=conversation)


def test_a_conversation_that_ends_with_a_call_needs_its_result(client):
    call = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\] ends with a tool_use block"):
        client.messages.create(
            model="fake", max_tokens=9, messages=[*ASK, {"role": "assistant", "content": [call]}], tools=[NOW]
        )


def test_the_clients_tool_runner_calls_and_answers(client):
    asked = []

    @anthropic.beta_tool
    def clock(city: Literal["rome", "oslo"]) -> str:
        """The time in a city.

        Args:
            city: the name of the city
        """
        asked.append(city)
        if len(asked) == 1:
            raise ValueError("no such city")
        return "noon"

    runner = client.beta.messages.tool_runner(
        model="fake", max_tokens=400, messages=ASK, tools=[clock], max_iterations=3,
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, betas=["interleaved-thinking-2025-05-14"],
    )  # fmt: skip
    messages = list(runner)
    assert len(messages) == 3
    assert asked[:2] == [message.content[0].input["city"] for message in messages[:2]]
    sizes = [message.usage.input_tokens + message.usage.cache_read_input_tokens for message in messages]
    assert sizes[0] < sizes[1] < sizes[2]  # each has the calls and results before it


def test_a_tool_is_as_strict_as_it_says(caller):
    """A strict one with a keyword that cannot be kept is refused; without `strict` the rest of its schema is kept."""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    for strict, status in ((None, 200), (False, 200), (True, 400), ("yes", 400)):
        tool = {"name": "f", "input_schema": schema, "strict": strict}
        answer = web.post(f"{caller.url}/v1/messages", json={"messages": ASK, "max_tokens": 2, "tools": [tool]})
        assert answer.status_code == status, (strict, answer.text)
    assert answer.json()["error"]["message"] == "tools[0].strict is 'yes'; it must be true or false"


@pytest.mark.parametrize("description", [5, ["a"], {"a": 1}])
def test_a_description_is_a_text(caller, description):
    function = {"name": "f", "description": description}
    for route, asked in (
        ("chat/completions", {"messages": ASK, "tools": [{"type": "function", "function": function}]}),
        ("chat/completions", {"messages": ASK, "tools": [{"type": "custom", "custom": function}]}),
        ("responses", {"input": "a", "tools": [{"type": "function", **function}]}),
        ("messages", {"messages": ASK, "max_tokens": 2, "tools": [function | {"input_schema": {}}]}),
    ):
        answer = web.post(f"{caller.url}/v1/{route}", json=asked)
        assert answer.status_code == 400, answer.text
        assert ".description is" in answer.json()["error"]["message"]
