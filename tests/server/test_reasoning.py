"""Thinking in chats, through a real client. What the fake samples is random but for its mask."""

import re
from collections.abc import Callable, Iterator

import openai
import pytest

from tests import web
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, TEMPLATE, served_model

ASK = [{"role": "user", "content": "one and one"}]
OPEN = [{"role": "user", "content": "open"}]
ANSWER = {"type": "regex", "value": "[a-c]{4}"}
# The mention of the last mark tells that the model thinks.
THINKING_TEMPLATE = (
    TEMPLATE + "{% if messages[0].content == 'open' %}<think>\n{% if false %}</think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    running = RunningServer(model=served_model(end_ids=(0,), pieces=JSON_PIECES, template=THINKING_TEMPLATE)).start()
    yield running
    running.stop()


@pytest.fixture
def client(thinker: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0)


def test_thinking_has_a_field_of_its_own_and_keeps_to_its_budget(client):
    asked = {"response_format": ANSWER, "thinking_budget": 7}
    answer = client.chat.completions.create(model="fake", messages=OPEN, n=3, extra_body=asked)
    for choice in answer.choices:
        assert 0 < len(choice.message.reasoning_content) <= 7  # a character is a token
        assert re.fullmatch("[a-c]{4}", choice.message.content)
        assert choice.finish_reason == "stop"
    num_tokens = 7 + len("</think>")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3 * num_tokens
    assert 3 * (num_tokens + 5) <= answer.usage.completion_tokens <= 3 * (num_tokens + 7)  # two blanks at most, the end


def test_thinking_streams_as_deltas_of_its_own(client):
    asked = {"extra_body": {"response_format": ANSWER, "thinking_budget": 9}, "seed": 3}
    (whole,) = client.chat.completions.create(model="fake", messages=OPEN, **asked).choices
    usage = {"include_usage": True}
    *chunks, last = client.chat.completions.create(
        model="fake", messages=OPEN, stream=True, stream_options=usage, **asked
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = [text for delta in deltas if (text := getattr(delta, "reasoning_content", None))]
    assert "".join(reasoning) == whole.message.reasoning_content
    assert len(reasoning) > 1
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    assert last.usage.completion_tokens_details.reasoning_tokens == 9 + len("</think>")


def test_an_answer_begins_in_the_section_that_the_template_opens(client):
    answer = client.chat.completions.create(model="fake", messages=OPEN, max_tokens=5, temperature=0)
    message = answer.choices[0].message
    assert message.content == ""
    assert message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5


def test_a_budget_alone_leaves_the_answer_free(client):
    answer = client.chat.completions.create(
        model="fake", messages=OPEN, max_tokens=40, seed=1, extra_body={"thinking_budget": 3}
    )
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3 + len("</think>")
    assert answer.choices[0].message.content


@pytest.mark.parametrize("asked", [OPEN, ASK])
def test_no_effort_is_no_thinking(client, asked):
    answer = client.chat.completions.create(
        model="fake", messages=asked, reasoning_effort="none", extra_body={"response_format": ANSWER}
    )
    assert not hasattr(answer.choices[0].message, "reasoning_content")
    assert re.fullmatch("[a-c]{4}", answer.choices[0].message.content)


def test_effort_turns_the_templates_switches(make_server: Callable[..., RunningServer]):
    template = TEMPLATE + (
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %} {{ reasoning_effort }}"
        "{% if false %}</think>{% endif %}"
    )
    url = make_server(model=served_model(end_ids=(0,), template=template)).url

    def rendered(**fields: object) -> str:
        return web.post(f"{url}/chat_tokenize", json={"messages": ASK, **fields}).json()["templated_text"]

    assert rendered().endswith("assistant:  ")
    assert rendered(reasoning_effort="high").endswith("assistant: True high")
    assert rendered(reasoning_effort="none").endswith("assistant: False none")
    kept = rendered(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert kept.endswith("assistant: False high")


@pytest.mark.parametrize("messages", [ASK, OPEN])
@pytest.mark.parametrize(
    ("pattern", "why"),
    [("[a&&b]", "no answer fits it"), ("(a|b){12000}", "is a regular expression of 24000 characters")],
)
def test_what_follows_the_thinking_is_checked_as_without_thinking(thinker, messages, pattern, why):
    asked = {"messages": messages, "response_format": {"type": "regex", "value": pattern}, "max_tokens": 1}
    refused = web.post(f"{thinker.url}/v1/chat/completions", json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"
    assert why in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort is 'much'; it can be none, minimal, low, medium, high"),
        ({"thinking_budget": -1}, "thinking_budget is -1"),
        ({"thinking_budget": "long"}, "thinking_budget"),
    ],
)
def test_what_is_wrong_with_thinking_is_named(thinker, fields, why):
    refused = web.post(f"{thinker.url}/v1/chat/completions", json={"messages": ASK} | fields)
    assert refused.status_code == 400
    assert why in refused.json()["error"]["message"]


def test_thinking_goes_back_to_the_template_under_any_of_its_names(make_server: Callable[..., RunningServer]):
    template = "{% for message in messages %}{{ message.reasoning_content or '' }}{{ message.content }}{% endfor %}"
    url = make_server(model=served_model(end_ids=(0,), template=template)).url
    for name in ("reasoning_content", "reasoning"):
        messages = [*ASK, {"role": "assistant", "content": "two", name: "so it is "}]
        told = web.post(f"{url}/chat_tokenize", json={"messages": messages}).json()["templated_text"]
        assert told == "one and oneso it is two"
