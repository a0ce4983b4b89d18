"""llama-index: its OpenAILike, OpenAI's responses, typed answers and agents."""

import asyncio

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("llama_index.core")
like = pytest.importorskip("llama_index.llms.openai_like")
openai = pytest.importorskip("llama_index.llms.openai")

from llama_index.core.agent.workflow import AgentWorkflow  # noqa: E402
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402

HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Say hello.")]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def make(v1, key, model, **options):
    """Whether the model is one for chats and can call functions is a setting."""
    settings = {"context_window": 4096, "max_tokens": 100, "temperature": 0, "max_retries": 0} | options
    return like.OpenAILike(model=model, api_base=v1, api_key=key, **settings)


@pytest.fixture(scope="module")
def chat(v1, key, model):
    return make(v1, key, model, is_chat_model=True, is_function_calling_model=True)


def test_it_chats(chat):
    answer = chat.chat(HELLO)
    assert answer.message.content
    assert 0 < answer.raw.usage.completion_tokens <= 100


def test_it_streams(chat):
    *_, last = chat.stream_chat(HELLO)
    assert last.message.content


def test_it_completes_texts(v1, key, model):
    llm = make(v1, key, model, is_chat_model=False)
    assert llm.complete("One, two,").text
    *_, last = llm.stream_complete("One, two,")
    assert last.text


def test_tool_calls_round_trip(chat):
    tool = FunctionTool.from_defaults(get_weather)
    answer = chat.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
    call = chat.get_tool_calls_from_response(answer)[0]
    assert call.tool_name == "get_weather"
    result = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
    assert chat.chat([*HELLO, answer.message, result]).message.content


@pytest.mark.parametrize("structured", [False, True], ids=["by a tool", "by a schema"])
def test_answers_are_of_a_class(v1, key, model, structured):
    llm = make(
        v1, key, model, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=structured
    )
    assert isinstance(llm.structured_predict(Person, prompt()), Person)


def prompt():
    from llama_index.core.prompts import PromptTemplate

    return PromptTemplate("Describe a person.")


def test_an_agent_runs(chat):
    async def ask() -> str:
        flow = AgentWorkflow.from_tools_or_functions([get_weather], llm=chat, system_prompt="Be brief.")
        return str(await flow.run(user_msg="Say hello.", max_iterations=3, early_stopping_method="generate"))

    assert isinstance(asyncio.run(ask()), str)


def test_it_works_with_responses(v1, key, model):
    llm = openai.OpenAIResponses(
        model=model, api_base=v1, api_key=key, max_output_tokens=100, temperature=0, max_retries=0, context_window=4096
    )
    assert llm.chat(HELLO).message.content
    assert "".join(part.delta or "" for part in llm.stream_chat(HELLO))


def test_it_works_side_by_side(chat):
    async def ask() -> list:
        return await asyncio.gather(*(chat.achat(HELLO) for _ in range(3)))

    assert len(asyncio.run(ask())) == 3
