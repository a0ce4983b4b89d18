"""The `anthropic` package: messages, streams, tools and their results, counts of tokens."""

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel

anthropic = pytest.importorskip("anthropic")

HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}

GREEDY = {"temperature": 0}  # the client's own arguments no longer have it


class Person(BaseModel):
    """The client sends no bounds of numbers and lengths: it has them in descriptions, which hold no model."""

    name: Literal["Ada", "Alan"]
    is_alive: bool


@pytest.fixture(scope="module")
def client(url, key):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def test_it_gets_a_message(client, model):
    answer = client.messages.create(
        model=model, max_tokens=8, system="Be brief.", messages=HELLO, stop_sequences=["%%"],
        metadata={"user_id": "u1"}, service_tier="auto", cache_control={"type": "ephemeral"},
        thinking={"type": "disabled"}, extra_body=GREEDY | {"top_p": 0.9, "top_k": 20},
    )  # fmt: skip
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.content[0].type == "text"
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8


def test_a_stop_sequence_is_named(client, model):
    answer = client.messages.create(
        model=model, max_tokens=300, messages=HELLO, extra_body=GREEDY, stop_sequences=[" ", "\n"]
    )
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence in (" ", "\n")


def test_it_streams(client, model):
    with client.messages.stream(model=model, max_tokens=8, messages=HELLO, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.usage.output_tokens == 8
    assert final.stop_reason == "max_tokens"


def test_it_gets_raw_events(client, model):
    kinds = [event.type for event in client.messages.create(model=model, max_tokens=4, messages=HELLO, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_system_and_content_can_be_blocks(client, model):
    answer = client.messages.create(
        model=model, max_tokens=4,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Say hello."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "user", "content": [{"type": "text", "text": "Again.", "cache_control": {"type": "ephemeral"}}]},
        ],
    )  # fmt: skip
    assert answer.content[0].type == "text"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_use_round_trips(client, model, stream):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": model, "max_tokens": 100, "tools": [WEATHER], "extra_body": GREEDY}
    if stream:
        with client.messages.stream(messages=messages, tool_choice={"type": "any"}, **options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(messages=messages, tool_choice={"type": "any"}, **options)
    assert answer.stop_reason == "tool_use"
    use = answer.content[-1]
    assert use.name == "get_weather"
    assert isinstance(use.input["city"], str)
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}]},
    ]
    again = client.messages.create(messages=messages, tool_choice={"type": "none"}, **options)
    assert again.content[0].type == "text"


def test_it_parses_an_answer_into_a_class(client, model):
    answer = client.messages.parse(
        model=model, max_tokens=200, output_format=Person, messages=[{"role": "user", "content": "Describe a person."}]
    )
    assert isinstance(answer.parsed_output, Person)


def test_its_tool_runner_calls_functions(client, model):
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=100, tools=[get_weather], tool_choice={"type": "any"}, max_iterations=2,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}], extra_body=GREEDY,
    )  # fmt: skip
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert len(asked) >= 2


def test_it_lists_the_models(client, model):
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).type == "model"


def test_it_counts_tokens(client, model):
    count = client.messages.count_tokens(model=model, system="Be brief.", messages=HELLO, tools=[WEATHER])
    answer = client.messages.create(model=model, max_tokens=1, system="Be brief.", messages=HELLO, tools=[WEATHER])
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_it_works_side_by_side(url, key, model):
    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
            asks = [client.messages.create(model=model, max_tokens=4, messages=HELLO) for _ in range(4)]
            return [answer.content[0].text for answer in await asyncio.gather(*asks)]

    assert len(asyncio.run(ask())) == 4


def test_errors_have_the_clients_types(client, url, model, too_long):
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=model, max_tokens=8, messages=[{"role": "user", "content": too_long}])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=8, messages=HELLO)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        anthropic.Anthropic(base_url=url, api_key="wrong").messages.create(model=model, max_tokens=8, messages=HELLO)
    assert caught.value.body["error"]["type"] == "authentication_error"
    assert caught.value.request_id
