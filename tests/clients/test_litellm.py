"""litellm, by its providers for OpenAI-compatible servers, vLLM and hub endpoints, and its router."""

import asyncio
import json

import pytest
from pydantic import BaseModel

litellm = pytest.importorskip("litellm")

HELLO = [{"role": "user", "content": "Say hello."}]
TOOL = {
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


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request, v1, key, model):
    return {"model": f"{request.param}/{model}", "api_base": v1, "api_key": key, "num_retries": 0, "temperature": 0}


def test_it_chats(options):
    answer = litellm.completion(messages=HELLO, max_tokens=6, **options)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 6


def test_it_streams_with_usage(options):
    parts = list(litellm.completion(
        messages=HELLO, max_tokens=6, stream=True, stream_options={"include_usage": True}, **options
    ))  # fmt: skip
    whole = litellm.stream_chunk_builder(parts)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens == 6


def test_it_completes_texts(v1, key, model):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="One, two,", max_tokens=5, api_base=v1, api_key=key
    )
    assert answer.choices[0].text


def test_it_chats_with_a_hub_endpoint(url, key, model):
    answer = litellm.completion(
        model=f"huggingface/{model}", messages=HELLO, max_tokens=6, api_base=f"{url}/v1/chat/completions", api_key=key
    )
    assert answer.choices[0].message.content


def test_answers_follow_a_class(options):
    answer = litellm.completion(messages=HELLO, response_format=Person, max_tokens=200, **options)
    Person.model_validate_json(answer.choices[0].message.content)


def test_tool_calls_round_trip(options):
    message = (
        litellm.completion(
            messages=HELLO, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=100, **options
        )
        .choices[0]
        .message
    )
    call = message.tool_calls[0]
    assert "city" in json.loads(call.function.arguments)
    back = [*HELLO, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert litellm.completion(messages=back, tools=[TOOL], tool_choice="none", max_tokens=6, **options).choices
    assert litellm.completion(messages=back, max_tokens=6, **options).choices[0].message.content


def test_reasoning_effort_is_passed_on(options):
    answer = litellm.completion(
        messages=HELLO, max_tokens=6, reasoning_effort="low", allowed_openai_params=["reasoning_effort"], **options
    )
    assert answer.choices[0].message.content


def test_errors_have_the_clients_types(options, too_long):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": too_long}], **options)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=HELLO, **(options | {"api_key": "wrong"}))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=HELLO, **(options | {"model": "openai/other"}))


def test_its_router_falls_back_when_the_context_is_too_short(options, too_long):
    params = {name: value for name, value in options.items() if name != "num_retries"}
    long = params | {"mock_response": "from the model with the long context"}
    router = litellm.Router(
        model_list=[{"model_name": "short", "litellm_params": params}, {"model_name": "long", "litellm_params": long}],
        context_window_fallbacks=[{"short": ["long"]}], num_retries=0,
    )  # fmt: skip
    answer = router.completion("short", messages=[{"role": "user", "content": too_long}])
    assert answer.choices[0].message.content == "from the model with the long context"


def test_it_works_side_by_side(options):
    async def ask() -> list:
        return await asyncio.gather(*(litellm.acompletion(messages=HELLO, max_tokens=4, **options) for _ in range(4)))

    assert len(asyncio.run(ask())) == 4
