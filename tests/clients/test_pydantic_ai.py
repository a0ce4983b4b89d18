"""pydantic-ai: agents with tools and typed outputs, by chat completions, responses and messages."""

import asyncio

import pytest
from pydantic import BaseModel, Field

ai = pytest.importorskip("pydantic_ai")


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def chat_completions(url, key, model):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def responses(url, key, model):
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def anthropic(url, key, model):
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    return AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client))


def huggingface(url, key, model):
    from pydantic_ai.models.huggingface import HuggingFaceModel
    from pydantic_ai.providers.huggingface import HuggingFaceProvider

    return HuggingFaceModel(model, provider=HuggingFaceProvider(base_url=url, api_key=key))


FORMS = {form.__name__: form for form in (chat_completions, responses, anthropic, huggingface)}
SETTINGS = {"max_tokens": 100, "temperature": 0}


@pytest.fixture(params=FORMS)
def make_agent(request, url, key, model):
    return lambda **options: ai.Agent(FORMS[request.param](url, key, model), model_settings=SETTINGS, **options)


def test_it_answers_with_usage(make_agent):
    result = make_agent(instructions="Be brief.").run_sync("Say hello.")
    assert result.output
    assert result.usage().output_tokens > 0


def test_it_streams(make_agent):
    async def ask() -> str:
        async with make_agent().run_stream("Say hello.") as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    assert asyncio.run(ask())


def test_the_output_is_of_a_class_by_a_tool(make_agent):
    result = make_agent(output_type=Person).run_sync("Describe a person.")
    assert isinstance(result.output, Person)
    # The history now has a call whose message has no content.
    again = make_agent().run_sync("Again.", message_history=result.all_messages())
    assert isinstance(again.output, str)


@pytest.mark.parametrize("make_agent", ["chat_completions", "responses"], indirect=True)
def test_the_output_is_of_a_class_by_a_schema(make_agent):
    """pydantic-ai sends schemas to these two alone."""
    result = make_agent(output_type=ai.NativeOutput(Person)).run_sync("Describe a person.")
    assert isinstance(result.output, Person)


def test_a_tool_is_offered_beside_a_typed_output(make_agent):
    agent = make_agent(output_type=Person, retries=3)
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    try:
        result = agent.run_sync("Describe a person.", usage_limits=ai.UsageLimits(request_limit=4))
    except ai.UsageLimitExceeded:
        assert asked
    else:
        assert isinstance(result.output, Person)


def test_a_typed_output_is_streamed(make_agent):
    async def ask() -> Person:
        async with make_agent(output_type=Person).run_stream("Describe a person.") as result:
            return await result.get_output()

    assert isinstance(asyncio.run(ask()), Person)


def test_errors_have_the_clients_types(make_agent, too_long):
    with pytest.raises(ai.ModelHTTPError) as caught:
        make_agent().run_sync(too_long)
    assert caught.value.status_code in (400, 422)
