"""Thinking in chats, through a real client. The grammar makes the fake say what is to be read."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, TEMPLATE, served_model

ASK = [{"role": "user", "content": "one and one"}]
THOUGHT = {"type": "regex", "value": "<think>so be it</think>\n[a-c]{4}"}
# The mention of the last mark tells that the model thinks.
THINKING_TEMPLATE = (
    TEMPLATE + "{% if messages[0].content == 'open' %}<think>\n{% endif %}{% if false %}</think>{% endif %}"
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    running = RunningServer(model=served_model(end_ids=(0,), pieces=JSON_PIECES, template=THINKING_TEMPLATE)).start()
    yield running
    running.stop()


@pytest.fixture
def client(thinker: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0)


def test_thinking_has_a_field_of_its_own(client):
    answer = client.chat.completions.create(model="fake", messages=ASK, n=2, extra_body={"response_format": THOUGHT})
    for choice in answer.choices:
        assert choice.message.reasoning_content == "so be it"
        assert len(choice.message.content) == 4
    num_tokens = len(">so be it</think>")  # a letter is a token, and only a whole mark begins the thinking
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * num_tokens


def test_thinking_streams_as_deltas_of_its_own(client):
    asked = {"seed": 3, "extra_body": {"response_format": THOUGHT}, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model="fake", messages=ASK, stream=True, **asked)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == "so be it"
    assert len([text for text in reasoning if text]) > 1
    assert len("".join(delta.content or "" for delta in deltas)) == 4
    assert last.usage.completion_tokens_details.reasoning_tokens > 8


def test_an_answer_begins_in_the_section_that_the_template_opens(client):
    asked = [{"role": "user", "content": "open"}]
    answer = client.chat.completions.create(model="fake", messages=asked, max_tokens=5, temperature=0)
    message = answer.choices[0].message
    assert message.content == ""
    assert message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5
