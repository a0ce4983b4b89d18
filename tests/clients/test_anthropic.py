"""The `anthropic` package: messages, streams, tools and their results, counts of tokens."""

import asyncio

import pytest

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


@pytest.fixture(scope="module")
def client(url, key):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def test_it_gets_a_message(client, model):
    answer = client.messages.create(
        model=model, max_tokens=8, system="Be brief.", messages=HELLO, temperature=0.5, top_p=0.9, top_k=20,
        stop_sequences=["%%"], metadata={"user_id": "u1"},
    )  # fmt: skip
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.content[0].type == "text"
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8


def test_a_stop_sequence_is_named(client, model):
    answer = client.messages.create(
        model=model, max_tokens=300, messages=HELLO, temperature=0, stop_sequences=[" ", "\n"]
    )
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence in (" ", "\n")


def test_it_streams(client, model):
    with client.messages.stream(model=model, max_tokens=8, messages=HELLO) as stream:
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


@pytest.mark.parametrize("stream", [False, True])
def test_tool_use_round_trips(client, model, stream):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": model, "max_tokens": 100, "tools": [WEATHER], "temperature": 0}
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
