"""outlines: answers by class, choice, regular expression and grammar, with its clients for vLLM, SGLang and others."""

import asyncio
import re
from typing import Literal

import pytest
from pydantic import BaseModel, Field

outlines = pytest.importorskip("outlines")
openai = pytest.importorskip("openai")
hub = pytest.importorskip("huggingface_hub")

ARITHMETIC = """
?start: sum
sum: NUMBER "+" NUMBER
NUMBER: /[0-9]{1,3}/
"""


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def vllm(url, key, model):
    return outlines.from_vllm(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), model)


def sglang(url, key, model):
    return outlines.from_sglang(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), model)


def tgi(url, key, model):
    return outlines.from_tgi(hub.InferenceClient(base_url=url, api_key=key))


def plain_openai(url, key, model):
    return outlines.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), model)


MODELS = {form.__name__: form for form in (vllm, sglang, tgi, plain_openai)}


@pytest.fixture(params=MODELS)
def any_model(request, url, key, model):
    return MODELS[request.param](url, key, model)


@pytest.fixture(params=["vllm", "sglang", "tgi"])
def regex_model(request, url, key, model):
    return MODELS[request.param](url, key, model)


def room(model, tokens: int) -> dict:
    return {"max_new_tokens" if isinstance(model, outlines.models.TGI) else "max_tokens": tokens}


def alone(model) -> dict:
    """On `/` the prompt stands before the answer unless asked otherwise."""
    return {"return_full_text": False} if isinstance(model, outlines.models.TGI) else {}


def test_it_answers_freely(any_model):
    assert any_model("Say hello.", **room(any_model, 6))


def test_answers_are_of_a_class(any_model):
    text = any_model("Describe a person.", Person, **room(any_model, 100), **alone(any_model))
    Person.model_validate_json(text)


def test_answers_are_one_of_several(regex_model):
    text = regex_model("Is water wet?", Literal["yes", "no"], **room(regex_model, 10), **alone(regex_model))
    assert text in ("yes", "no")


def test_answers_match_a_regular_expression(regex_model):
    year = outlines.types.Regex(r"(19|20)[0-9]{2}")
    text = regex_model("A year:", year, **room(regex_model, 10), **alone(regex_model))
    assert re.fullmatch(r"(19|20)[0-9]{2}", text)


def test_answers_are_of_a_basic_type(regex_model):
    assert (
        int(regex_model("A number:", outlines.types.integer, **room(regex_model, 10), **alone(regex_model))) is not None
    )


def test_answers_follow_a_grammar(url, key, model):
    text = vllm(url, key, model)("A sum:", outlines.types.CFG(ARITHMETIC), max_tokens=20)
    assert re.fullmatch(r"[0-9]{1,3}\+[0-9]{1,3}", text)


def test_it_streams_a_class(url, key, model):
    text = "".join(vllm(url, key, model).stream("Describe a person.", Person, max_tokens=100))
    Person.model_validate_json(text)


def test_it_works_side_by_side(url, key, model):
    async def ask() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        asks = [outlines.from_vllm(client, model)("A person.", Person, max_tokens=100) for _ in range(3)]
        return await asyncio.gather(*asks)

    for text in asyncio.run(ask()):
        Person.model_validate_json(text)
