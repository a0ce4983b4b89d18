"""haystack: its generators by chat completions and by responses, and an agent."""

import json
from functools import partial

import pytest
from pydantic import BaseModel, Field

haystack = pytest.importorskip("haystack")

from haystack.components.agents import Agent  # noqa: E402
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator  # noqa: E402
from haystack.dataclasses import ChatMessage  # noqa: E402
from haystack.tools import tool  # noqa: E402
from haystack.utils import Secret  # noqa: E402

HELLO = [ChatMessage.from_system("Be brief."), ChatMessage.from_user("Say hello.")]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def make_generator(form, limit, url, key, model, generation_kwargs=None, **options):
    return form(
        api_key=Secret.from_token(key), model=model, api_base_url=f"{url}/v1", max_retries=0,
        generation_kwargs={limit: 100, "temperature": 0} | (generation_kwargs or {}), **options,
    )  # fmt: skip


FORMS = {
    "chat completions": partial(make_generator, OpenAIChatGenerator, "max_completion_tokens"),
    "responses": partial(make_generator, OpenAIResponsesChatGenerator, "max_output_tokens"),
}


@pytest.fixture(params=FORMS)
def make(request, url, key, model):
    return lambda **options: FORMS[request.param](url, key, model, **options)


def test_it_answers_with_usage(make):
    (reply,) = make().run(HELLO)["replies"]
    assert reply.text
    usage = reply.meta["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) > 0


def test_it_streams(make):
    parts = []
    (reply,) = make(streaming_callback=lambda part: parts.append(part.content)).run(HELLO)["replies"]
    assert "".join(parts) == reply.text


def test_tool_calls_round_trip(make):
    generator = make(tools=[get_weather], generation_kwargs={"tool_choice": "required"})
    (reply,) = generator.run(HELLO)["replies"]
    call = reply.tool_calls[0]
    assert call.tool_name == "get_weather"
    results = [ChatMessage.from_tool("sunny", origin=origin) for origin in reply.tool_calls]
    (reply,) = make().run([*HELLO, reply, *results])["replies"]
    assert reply.text


@pytest.mark.parametrize(("form", "field"), [("chat completions", "response_format"), ("responses", "text_format")])
def test_answers_follow_a_class(url, key, model, form, field):
    generator = FORMS[form](url, key, model, generation_kwargs={field: Person})
    (reply,) = generator.run([ChatMessage.from_user("Describe a person.")])["replies"]
    assert list(json.loads(reply.text)) == ["name", "age"]


def test_an_agent_runs(make):
    agent = Agent(chat_generator=make(), tools=[get_weather], max_agent_steps=3)
    assert agent.run(messages=HELLO)["messages"][-1]
