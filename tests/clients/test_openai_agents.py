"""openai-agents: runs with tools, handoffs and typed outputs, by chat completions and by responses (its default)."""

import asyncio

import pytest
from pydantic import BaseModel, Field

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")
agents.set_tracing_disabled(True)


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


SHORT = agents.ModelSettings(max_tokens=100, temperature=0)
ONE_CALL = agents.ModelSettings(max_tokens=100, temperature=0, tool_choice="required", parallel_tool_calls=False)


@pytest.fixture(params=["chat completions", "responses"])
def make_agent(request, v1, key, model):
    client = openai.AsyncOpenAI(base_url=v1, api_key=key, max_retries=0)
    form = agents.OpenAIChatCompletionsModel if request.param == "chat completions" else agents.OpenAIResponsesModel
    runs_on = form(model=model, openai_client=client)
    return lambda **options: agents.Agent(**({"name": "helper", "model": runs_on, "model_settings": SHORT} | options))


def test_it_answers(make_agent):
    result = agents.Runner.run_sync(make_agent(instructions="Be brief."), "Say hello.")
    assert isinstance(result.final_output, str)
    assert result.raw_responses[0].usage.output_tokens > 0


def test_a_run_calls_a_tool_and_goes_on(make_agent):
    result = agents.Runner.run_sync(
        make_agent(tools=[get_weather], model_settings=ONE_CALL), "What is the weather in Paris?", max_turns=3
    )
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert isinstance(result.final_output, str)


def test_a_streamed_run_calls_a_tool_and_goes_on(make_agent):
    async def ask() -> tuple[list[str], str]:
        result = agents.Runner.run_streamed(
            make_agent(tools=[get_weather], model_settings=ONE_CALL), "What is the weather in Paris?", max_turns=3
        )
        kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        return kinds, result.final_output

    kinds, output = asyncio.run(ask())
    assert "tool_called" in kinds
    assert "tool_output" in kinds
    assert isinstance(output, str)


def test_the_output_is_of_a_class(make_agent):
    result = agents.Runner.run_sync(make_agent(output_type=Person), "Describe a person.")
    assert isinstance(result.final_output, Person)


def test_the_output_is_of_a_class_after_a_tool(make_agent):
    """The first turn has a tool and a schema; a small model would call for ever, so the second has no tool."""
    called = []

    @agents.function_tool(is_enabled=lambda *_: not called)
    def get_age(name: str) -> int:
        """The age of a person."""
        called.append(name)
        return 30

    agent = make_agent(tools=[get_age], model_settings=ONE_CALL, output_type=Person)
    result = agents.Runner.run_sync(agent, "Describe a person.", max_turns=3)
    assert len(called) == 1
    assert isinstance(result.final_output, Person)


def test_an_agent_hands_over_to_another(make_agent):
    """The second agent has no tools: the history holds a call all the same. Its answer has an end: the client takes no
    response that is cut off."""
    other = make_agent(name="other", output_type=Person)
    first = make_agent(name="first", handoffs=[other], model_settings=ONE_CALL)
    result = agents.Runner.run_sync(first, "Hand over.", max_turns=3)
    assert result.last_agent.name == "other"
    assert isinstance(result.final_output, Person)


def test_a_conversation_goes_on(make_agent):
    agent = make_agent()
    first = agents.Runner.run_sync(agent, "Say hello.")
    again = agents.Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "Again."}])
    assert isinstance(again.final_output, str)


def test_a_conversation_goes_on_by_the_id_of_the_last_response(v1, key, model):
    client = openai.AsyncOpenAI(base_url=v1, api_key=key, max_retries=0)
    agent = agents.Agent(
        name="helper", model=agents.OpenAIResponsesModel(model=model, openai_client=client), model_settings=SHORT
    )
    first = agents.Runner.run_sync(agent, "Say hello.")
    again = agents.Runner.run_sync(agent, "Again.", previous_response_id=first.last_response_id)
    assert again.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.input_tokens
