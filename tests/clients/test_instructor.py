"""instructor: answers as classes, by tools and by schemas."""

import asyncio

import pytest
from pydantic import BaseModel, Field

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

ASK = [{"role": "user", "content": "Describe a person."}]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
OPTIONS = {"messages": ASK, "max_tokens": 200, "temperature": 0, "max_retries": 1}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_answers_are_of_a_class(v1, key, model, mode):
    client = instructor.from_openai(openai.OpenAI(base_url=v1, api_key=key), mode=mode)
    person, answer = client.chat.completions.create_with_completion(model=model, response_model=Person, **OPTIONS)
    assert isinstance(person, Person)
    assert answer.usage.completion_tokens > 0


def test_a_class_is_streamed_as_it_grows(v1, key, model):
    client = instructor.from_openai(openai.OpenAI(base_url=v1, api_key=key), mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(model=model, response_model=Person, **OPTIONS)
    assert last.name is not None
    assert last.age is not None


def test_several_are_streamed(v1, key, model):
    client = instructor.from_openai(openai.OpenAI(base_url=v1, api_key=key), mode=instructor.Mode.JSON_SCHEMA)
    people = client.chat.completions.create_iterable(model=model, response_model=Person, **(OPTIONS | {"stream": True}))
    assert isinstance(next(iter(people)), Person)


def test_it_works_with_responses(v1, key, model):
    mode = instructor.Mode.RESPONSES_TOOLS
    client = instructor.from_openai(openai.OpenAI(base_url=v1, api_key=key), mode=mode)
    person = client.responses.create(
        model=model,
        input="Describe a person.",
        response_model=Person,
        max_output_tokens=200,
        temperature=0,
        max_retries=1,
    )
    assert isinstance(person, Person)


def test_it_works_with_messages(url, key, model):
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=url, api_key=key), mode=instructor.Mode.ANTHROPIC_TOOLS
    )
    options = {name: value for name, value in OPTIONS.items() if name != "temperature"}  # gone from that client
    assert isinstance(client.messages.create(model=model, response_model=Person, **options), Person)


def test_it_works_side_by_side(v1, key, model):
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=v1, api_key=key), mode=instructor.Mode.JSON_SCHEMA)

    async def ask() -> list[Person]:
        asks = [client.chat.completions.create(model=model, response_model=Person, **OPTIONS) for _ in range(3)]
        return await asyncio.gather(*asks)

    assert len(asyncio.run(ask())) == 3
