"""The `openai` package: completions, chats, tools, parsed answers and responses."""

import asyncio
import json
from typing import Literal

import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["happy", "sad"]


@pytest.fixture(scope="module")
def client(v1, key):
    return openai.OpenAI(base_url=v1, api_key=key, max_retries=0)


def test_it_lists_the_models(client, model):
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_it_completes_several_prompts(client, model):
    answer = client.completions.create(
        model=model, prompt=["One, two,", "Red, green,"], max_tokens=5, logprobs=2, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(len(choice.logprobs.tokens) == 5 for choice in answer.choices)
    assert answer.usage.completion_tokens == 10


def test_it_chats(client, model):
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=8, n=2, logprobs=True, top_logprobs=0, seed=1, temperature=0
    )
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2
    assert len(answer.choices[0].logprobs.content) == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer._request_id


def test_it_sends_the_fields_of_larger_models(client, model):
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=4, store=False, metadata={"who": "me"}, service_tier="auto",
        verbosity="low", reasoning_effort="low", user="u1", prompt_cache_key="p", safety_identifier="s",
    )  # fmt: skip
    assert answer.choices[0].message.content


def test_it_streams_with_usage(client, model):
    parts = list(client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=6, stream=True, temperature=0,
        stream_options={"include_usage": True, "include_obfuscation": False},
    ))  # fmt: skip
    assert parts[-1].usage.completion_tokens == 6
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def test_its_stream_helper_collects_the_answer(client, model):
    with client.chat.completions.stream(model=model, messages=HELLO, stop=[" "], temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text


def test_it_works_side_by_side(v1, key, model):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=v1, api_key=key) as client:
            asks = [client.chat.completions.create(model=model, messages=HELLO, max_tokens=4) for _ in range(4)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asks)]

    assert len(asyncio.run(ask())) == 4


def test_it_parses_an_answer_into_a_class(client, model):
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Describe a person."}],
        response_format=Person,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_it_parses_an_answer_while_tools_are_offered(client, model):
    tool = openai.pydantic_function_tool(Person, name="save_person")
    answer = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Describe a person."}],
        response_format=Person, tools=[tool], max_tokens=200, temperature=0,
    )  # fmt: skip
    (choice,) = answer.choices
    if choice.finish_reason == "tool_calls":
        assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Person)
    else:
        assert isinstance(choice.message.parsed, Person)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_calls_round_trip(client, model, stream):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": model, "tools": [WEATHER], "max_tokens": 100, "temperature": 0, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(messages=messages, tool_choice="required", **options) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = (
            client.chat.completions.create(messages=messages, tool_choice="required", **options).choices[0].message
        )
    call = message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    # The message goes back as it came, content null and all.
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 °C"}]
    assert client.chat.completions.create(messages=messages, tool_choice="none", **options).choices[0].message.content
    assert client.chat.completions.create(model=model, messages=messages, max_tokens=5).choices[0].message.content


def test_it_allows_some_of_the_tools(client, model):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    answer = client.chat.completions.create(
        model=model, messages=HELLO, tools=[other, WEATHER], max_tokens=100, parallel_tool_calls=False,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )  # fmt: skip
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]


def test_errors_have_the_clients_types(client, v1, model, too_long):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": too_long}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert caught.value.request_id
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=v1, api_key="wrong").chat.completions.create(model=model, messages=HELLO)


def test_a_response_continues_another(client, model):
    first = client.responses.create(model=model, input="Say hello.", max_output_tokens=16, temperature=0)
    assert first.output[0].content[0].text == first.output_text
    second = client.responses.create(
        model=model, previous_response_id=first.id, max_output_tokens=16, temperature=0,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Again."}]}],
    )  # fmt: skip
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_is_streamed_with_numbered_events(client, model):
    with client.responses.stream(model=model, input="Say hello.", max_output_tokens=16, temperature=0) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"  # 16 tokens are not enough
    assert events[-1].response.output_text == text


def test_a_response_is_parsed_into_a_class(client, model):
    answer = client.responses.parse(
        model=model, input="Describe a person.", text_format=Person, max_output_tokens=200, temperature=0
    )
    assert isinstance(answer.output_parsed, Person)


def test_the_calls_of_a_response_round_trip(client, model):
    function = WEATHER["function"] | {"type": "function", "strict": True}
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": model, "tools": [function], "max_output_tokens": 100, "temperature": 0}
    answer = client.responses.create(input=question, tool_choice="required", parallel_tool_calls=False, **options)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert isinstance(json.loads(call.arguments)["city"], str)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(input=[*question, *answer.output, result], tool_choice="none", **options)
    assert again.output_text


def test_a_response_runs_in_the_background_and_is_cancelled(client, model):
    answer = client.responses.create(model=model, input="Tell a long story.", background=True)
    assert client.responses.cancel(answer.id).status == "cancelled"
