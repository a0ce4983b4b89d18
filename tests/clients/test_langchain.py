"""LangChain: langchain-openai, langchain-huggingface and langchain-anthropic, and agents of langchain itself."""

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("langchain")
tools = pytest.importorskip("langchain_core.tools")
messages = pytest.importorskip("langchain_core.messages")
agents = pytest.importorskip("langchain.agents")
structured = pytest.importorskip("langchain.agents.structured_output")


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@tools.tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def openai_chat(url, key, model, **options):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{url}/v1", api_key=key, model=model, max_tokens=100, temperature=0, max_retries=0,
        stream_usage=True, **options,
    )  # fmt: skip


def openai_responses(url, key, model):
    return openai_chat(url, key, model, use_responses_api=True)


def bearing(key):
    """It does not send its token to a server of one's own."""
    return {"headers": {"Authorization": f"Bearer {key}"}}


def huggingface(url, key, model):
    from langchain_huggingface import ChatHuggingFace, HuggingFaceEndpoint

    endpoint = HuggingFaceEndpoint(
        endpoint_url=url, server_kwargs=bearing(key), max_new_tokens=100, do_sample=False, task="text-generation"
    )
    return ChatHuggingFace(llm=endpoint, model_id=model, max_tokens=100, temperature=0)


def anthropic(url, key, model):
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(base_url=url, api_key=key, model=model, max_tokens=100, temperature=0, max_retries=0)


FORMS = {form.__name__: form for form in (openai_chat, openai_responses, anthropic)}
ALL_FORMS = FORMS | {"huggingface": huggingface}


@pytest.fixture(params=FORMS)
def chat(request, url, key, model):
    return FORMS[request.param](url, key, model)


@pytest.fixture(params=ALL_FORMS)
def any_chat(request, url, key, model):
    return ALL_FORMS[request.param](url, key, model)


def test_it_answers_with_usage(any_chat):
    answer = any_chat.invoke([("system", "Be brief."), ("user", "Say hello.")])
    assert answer.text
    assert answer.usage_metadata["output_tokens"] > 0


def test_it_streams(any_chat):
    whole = None
    for part in any_chat.stream("Say hello."):
        whole = part if whole is None else whole + part
    assert whole.text


def test_it_streams_with_usage(chat):
    whole = None
    for part in chat.stream("Say hello."):
        whole = part if whole is None else whole + part
    assert whole.usage_metadata["output_tokens"] > 0


def test_tool_calls_round_trip(chat):
    bound = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    question = messages.HumanMessage("What is the weather in Paris?")
    answer = bound.invoke([question])
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    results = [get_weather.invoke(call) for call in answer.tool_calls]
    assert chat.invoke([question, answer, *results]).text
    assert chat.bind_tools([get_weather]).invoke([question, answer, *results]).usage_metadata


def test_a_streamed_tool_call_is_whole_at_the_end(chat):
    whole = None
    for part in chat.bind_tools([get_weather], tool_choice="any").stream("What is the weather in Paris?"):
        whole = part if whole is None else whole + part
    assert isinstance(whole.tool_calls[0]["args"]["city"], str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_are_of_a_class(chat, method):
    assert isinstance(chat.with_structured_output(Person, method=method).invoke("Describe a person."), Person)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_answers_through_an_endpoint_follow_a_schema(url, key, model, method):
    """langchain-huggingface takes no classes for calls, and gives back what the JSON says."""
    answering = huggingface(url, key, model).with_structured_output(Person.model_json_schema(), method=method)
    Person.model_validate(answering.invoke("Describe a person."))


def test_answers_are_of_a_class_while_tools_are_offered(url, key, model):
    chat = openai_chat(url, key, model)
    answer = chat.bind_tools([get_weather], response_format=Person, strict=True).invoke("Describe a person.")
    assert answer.tool_calls or isinstance(answer.additional_kwargs["parsed"], Person)


def test_an_agent_ends_with_a_typed_answer(chat):
    form = structured.ProviderStrategy(Person)
    state = agents.create_agent(chat, tools=[], response_format=form).invoke({"messages": ["Describe a person."]})
    assert isinstance(state["structured_response"], Person)


def test_it_completes_texts(url, key, model):
    from langchain_openai import OpenAI

    llm = OpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_tokens=5, max_retries=0)
    assert len(llm.batch(["One, two,", "Red, green,"])) == 2
    assert "".join(llm.stream("One, two,"))


def test_it_generates_through_an_endpoint(url, key):
    from langchain_huggingface import HuggingFaceEndpoint

    llm = HuggingFaceEndpoint(endpoint_url=url, server_kwargs=bearing(key), max_new_tokens=5)
    assert llm.invoke("One, two,")
    assert "".join(llm.stream("One, two,"))


def test_it_works_side_by_side(any_chat):
    assert len(any_chat.batch(["One", "Two", "Three"])) == 3


def test_a_prompt_that_is_too_long_has_its_own_error(url, key, model, too_long):
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        openai_chat(url, key, model).invoke(too_long)
