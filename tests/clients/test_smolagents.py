"""smolagents: its models for OpenAI-compatible servers, the hub's client and litellm, and agents."""

import pytest

smolagents = pytest.importorskip("smolagents")


@smolagents.tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: the city
    """
    return f"sunny in {city}"


def openai(url, key, model):
    return smolagents.OpenAIModel(model, api_base=f"{url}/v1", api_key=key, max_tokens=100, temperature=0)


def hub(url, key, model):
    return smolagents.InferenceClientModel(url, token=key, max_tokens=100, temperature=0)


def litellm(url, key, model):
    return smolagents.LiteLLMModel(f"openai/{model}", api_base=f"{url}/v1", api_key=key, max_tokens=100, temperature=0)


MODELS = {form.__name__: form for form in (openai, hub, litellm)}


@pytest.fixture(params=MODELS)
def lm(request, url, key, model):
    return MODELS[request.param](url, key, model)


def test_it_answers_with_usage(lm):
    answer = lm([{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}], stop_sequences=["%%"])
    assert answer.content
    assert answer.token_usage.output_tokens > 0


def test_it_streams(lm):
    parts = list(lm.generate_stream([{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]))
    assert "".join(part.content or "" for part in parts)


def test_it_calls_a_tool(lm):
    answer = lm(
        [{"role": "user", "content": [{"type": "text", "text": "The weather in Paris?"}]}],
        tools_to_call_from=[get_weather], tool_choice="required",
    )  # fmt: skip
    assert answer.tool_calls[0].function.name == "get_weather"


def test_an_agent_calls_tools_until_its_last_step(lm):
    agent = smolagents.ToolCallingAgent([get_weather], lm, max_steps=2, verbosity_level=0)
    agent.run("What is the weather in Paris?")
    calls = [call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or []]
    assert calls
    assert all(call.name in ("get_weather", "final_answer") for call in calls)


def test_an_agent_writes_code_in_a_structured_answer(url, key, model):
    """Each step is an answer by a schema that holds a thought and code."""
    lm = openai(url, key, model)
    agent = smolagents.CodeAgent([], lm, max_steps=1, verbosity_level=0, use_structured_outputs_internally=True)
    agent.run("Add two and two.")
    (step, *_) = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
    assert step.model_output_message.content.lstrip().startswith("{")
