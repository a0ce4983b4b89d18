"""huggingface_hub's InferenceClient: /generate with all its forms of answers, and chat completions."""

import asyncio
import json

import pytest

hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")

HELLO = [{"role": "user", "content": "Say hello."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
}
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


@pytest.fixture(scope="module")
def client(url, key):
    return hub.InferenceClient(base_url=url, api_key=key)


@pytest.fixture(scope="module")
def generating(url, key):
    return hub.InferenceClient(model=url, token=key)


def test_it_generates_with_details(generating):
    answer = generating.text_generation(
        "One, two,", details=True, decoder_input_details=True, max_new_tokens=6, top_n_tokens=2, do_sample=True, seed=1
    )
    assert answer.details.generated_tokens == 6
    assert len(answer.details.tokens) == 6
    assert answer.details.prefill


def test_it_streams_tokens(generating):
    parts = list(
        generating.text_generation("One, two,", stream=True, details=True, max_new_tokens=6, return_full_text=False)
    )
    assert parts[-1].details.finish_reason == "length"
    assert parts[-1].generated_text == "".join(part.token.text for part in parts)


def test_it_generates_by_a_grammar(generating):
    text = generating.text_generation(
        "A person:",
        grammar={"type": "json", "value": PERSON},
        max_new_tokens=100,
        do_sample=False,
        return_full_text=False,
    )
    assert list(json.loads(text)) == ["name", "age"]
    regex = {"type": "regex", "value": "[a-c]{4}"}
    text = generating.text_generation("Letters:", grammar=regex, max_new_tokens=20, return_full_text=False)
    assert len(text) == 4


def test_it_chats(client):
    answer = client.chat_completion(HELLO, max_tokens=6, logprobs=True, top_logprobs=2, temperature=0)
    assert answer.choices[0].message.content
    assert len(answer.choices[0].logprobs.content) == 6
    assert answer.usage.completion_tokens == 6


def test_it_streams_a_chat_with_usage(client):
    parts = list(
        client.chat_completion(HELLO, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert parts[-1].usage.completion_tokens == 6


def test_it_chats_by_openais_names(client, model):
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=4)
    assert answer.choices[0].finish_reason == "length"


def test_answers_follow_a_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = client.chat_completion(HELLO, response_format=form, max_tokens=100, temperature=0)
    assert list(json.loads(answer.choices[0].message.content)) == ["name", "age"]


def test_tool_calls_round_trip(client):
    ask = {"tools": [WEATHER], "max_tokens": 200, "temperature": 0}
    message = client.chat_completion(HELLO, tool_choice="required", **ask).choices[0].message
    (call,) = message.tool_calls[:1]
    assert call.function.name == "get_weather"
    back = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat_completion(back, max_tokens=6).choices[0].message.content


def test_it_works_side_by_side(url, key):
    async def ask() -> list[str]:
        async with hub.AsyncInferenceClient(model=url, token=key) as client:
            return await asyncio.gather(*(client.text_generation("One,", max_new_tokens=4) for _ in range(4)))

    assert len(asyncio.run(ask())) == 4


def test_errors_have_the_clients_types(generating, url, too_long):
    with pytest.raises(errors.HfHubHTTPError) as caught:
        hub.InferenceClient(base_url=url, api_key="wrong").chat_completion(HELLO)
    assert caught.value.response.status_code == 401
    with pytest.raises(errors.ValidationError, match="4096"):
        generating.text_generation(too_long, max_new_tokens=4)
