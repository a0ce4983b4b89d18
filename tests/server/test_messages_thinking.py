"""Thinking in messages, through the anthropic client. What the fake samples is random but for its mask."""

import json
from collections.abc import Callable, Iterator

import anthropic
import pytest

from tests import web
from tests.server.running import RunningServer
from tests.server.test_messages import GREEDY, client_of, events_of
from tests.server.test_reasoning import OPEN, THINKING_TEMPLATE
from tests.server.vocabulary import JSON_PIECES, TEMPLATE, served_model

MARK = len("</think>")  # a character is a token
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}
BUDGET = {"type": "enabled", "budget_tokens": 7}


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    running = RunningServer(model=served_model(end_ids=(0,), pieces=JSON_PIECES, template=THINKING_TEMPLATE)).start()
    yield running
    running.stop()


@pytest.fixture
def client(thinker: RunningServer) -> anthropic.Anthropic:
    return client_of(thinker)


def test_thinking_is_a_block_before_the_text_and_keeps_to_its_budget(client):
    message = client.messages.create(
        model="fake", max_tokens=300, messages=OPEN, thinking=BUDGET, output_config=FORMAT, extra_body=GREEDY
    )
    thinking, text = message.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert 0 < len(thinking.thinking) <= 7
    assert thinking.signature
    assert json.loads(text.text)["a"] in ("b", "c")
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens_details.thinking_tokens == 7 + MARK


def test_thinking_streams_before_its_signature_and_the_text(client, thinker):
    asked = {"model": "fake", "max_tokens": 300, "messages": OPEN, "thinking": BUDGET, "output_config": FORMAT}
    whole = client.messages.create(**asked, extra_body=GREEDY)
    with client.messages.stream(**asked, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream if event.type in ("thinking", "signature", "text")]
        final = stream.get_final_message()
    assert [block.model_dump(exclude={"parsed_output"}) for block in final.content] == [
        block.model_dump() for block in whole.content
    ]
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    assert list(dict.fromkeys(kinds)) == ["thinking", "signature", "text"]
    assert kinds.count("thinking") > 1
    answer = web.post(f"{thinker.url}/v1/messages", json=asked | {"stream": True})
    deltas = [event["delta"]["type"] for event in events_of(answer.text) if event["type"] == "content_block_delta"]
    assert deltas.count("signature_delta") == 1


def test_thinking_that_is_not_shown_has_a_signature_and_no_text(client):
    message = client.messages.create(
        model="fake", max_tokens=300, messages=OPEN, thinking=BUDGET | {"display": "omitted"}, output_config=FORMAT
    )
    thinking, text = message.content
    assert (thinking.thinking, bool(thinking.signature)) == ("", True)
    assert json.loads(text.text)["a"] in ("b", "c")


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31_999}])
def test_thinking_without_a_limit_that_matters_ends_with_the_answer(client, thinking):
    message = client.messages.create(model="fake", max_tokens=20, messages=OPEN, thinking=thinking, extra_body=GREEDY)
    assert [block.type for block in message.content] == ["thinking"]
    assert (message.stop_reason, message.usage.output_tokens_details.thinking_tokens) == ("max_tokens", 20)


def test_thinking_is_left_out_where_it_was_not_asked_for_and_forbidden_where_it_is_disabled(client):
    asked = {"model": "fake", "max_tokens": 20, "messages": OPEN, "extra_body": GREEDY}
    silent = client.messages.create(**asked)
    assert (silent.content, silent.usage.output_tokens_details.thinking_tokens) == ([], 20)
    disabled = client.messages.create(**asked, thinking={"type": "disabled"})
    assert [block.type for block in disabled.content] == ["text"]
    assert disabled.usage.output_tokens_details.thinking_tokens == MARK


def test_the_template_is_told_whether_to_think_and_with_how_much_effort(make_server: Callable[..., RunningServer]):
    template = TEMPLATE + (
        "{% if enable_thinking is defined %}{{ 'a' if enable_thinking else 'bb' }}{% else %}ccc{% endif %}"
        "{% if reasoning_effort == 'xhigh' %}dddd{% endif %}{% if false %}</think>{% endif %}"
    )
    client = client_of(make_server(model=served_model(end_ids=(0,), pieces=JSON_PIECES, template=template)))

    def num_tokens(**fields: object) -> int:
        return client.messages.count_tokens(model="fake", messages=OPEN, **fields).input_tokens

    thinks = num_tokens(thinking=BUDGET)
    assert num_tokens(thinking={"type": "adaptive"}) == thinks
    assert num_tokens() == num_tokens(thinking={"type": "disabled"}) == thinks + 1
    assert num_tokens(thinking=BUDGET, output_config={"effort": "xhigh"}) == thinks + 4
    assert num_tokens(output_config={"effort": "xhigh"}) == thinks + 5


def test_thinking_that_is_sent_back_goes_to_the_template(make_server: Callable[..., RunningServer]):
    template = "{% for message in messages %}{{ message.reasoning_content or '' }}{{ message.content }}{% endfor %}"
    client = client_of(make_server(model=served_model(end_ids=(0,), pieces=JSON_PIECES, template=template)))

    def num_tokens(*blocks: dict) -> int:
        said = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "two"}]}
        return client.messages.count_tokens(model="fake", messages=[*OPEN, said, *OPEN]).input_tokens

    thought = {"type": "thinking", "thinking": "hmm", "signature": "any"}
    assert num_tokens(thought) == num_tokens() + 3
    assert num_tokens({"type": "redacted_thinking", "data": "abc"}) == num_tokens()


def test_a_budget_that_is_wrong_is_named(client):
    for budget in (-1, "many"):
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens is"):
            client.messages.create(
                model="fake", max_tokens=9, messages=OPEN, thinking={"type": "enabled", "budget_tokens": budget}
            )
