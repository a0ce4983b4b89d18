"""Any answer of a model can be sent, whole and as a stream, in every API."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.request import FinishReason
from quire.server.api.answer_reader import AnswerReader
from quire.server.api.anthropic.blocks import BlockEvents, merge_events
from quire.server.api.openai.parts import AnswerParts
from quire.server.api.responses.output import Output
from quire.server.service.answers import Answer
from quire.server.service.open_prompt import TokenDelta
from quire.text.answer_parts import AnswerForm
from tests.text.hostile_answers import FORMS, cut_at
from tests.text.test_hostile_answers import answers


def answer_of(texts: list[str]) -> Answer:
    answer = Answer()
    for number, text in enumerate(texts):
        finish = FinishReason.LENGTH if number == len(texts) - 1 else None
        answer.add(TokenDelta(0, 0, text, number, None, finish))
    return answer


def chat(form: AnswerForm, texts: list[str]) -> tuple[object, object]:
    """A message, and what its deltas add up to."""
    message = AnswerParts(form).message(answer_of(texts))
    parts = AnswerParts(form)
    streamed: dict[str, object] = {"content": "", "reasoning_content": "", "calls": []}
    for number, text in enumerate(texts):
        for delta in parts.deltas(text, is_last=number == len(texts) - 1, has_token=True):
            for key in ("content", "reasoning_content"):
                streamed[key] = f"{streamed[key]}{delta.get(key, '')}"
            for call in delta.get("tool_calls", ()):
                calls = streamed["calls"]
                assert isinstance(calls, list)
                if "id" in call:
                    calls.append(["", ""])
                of_kind = call["custom"] if "custom" in call else call["function"]
                calls[call["index"]][0] += of_kind.get("name", "")
                calls[call["index"]][1] += of_kind.get("input", of_kind.get("arguments", ""))
    whole = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [
            [one["custom"]["name"], one["custom"]["input"]]
            if "custom" in one
            else [one["function"]["name"], one["function"]["arguments"]]
            for one in message.get("tool_calls", ())
        ],
    }
    msgspec.json.encode(message)
    return whole, streamed


def responses(form: AnswerForm, texts: list[str]) -> tuple[object, object]:
    """The items of a response, without their ids, and those that its events end with."""
    found: list[list[object]] = []
    for is_streamed in (True, False):
        output = Output(form, is_streamed=is_streamed, is_sealed=True, pads=True)
        reader = AnswerReader(form)
        for number, text in enumerate(texts):
            output.add(reader.read(text, is_last=number == len(texts) - 1))
            events = output.take_events()
            msgspec.json.encode(events)
        output.finish(is_cut=True)
        events = output.take_events()
        msgspec.json.encode(events)
        ended = [msgspec.json.decode(item.json) for item in output.items]
        found.append(
            [
                {key: value for key, value in item.items() if key not in ("id", "call_id", "encrypted_content")}
                for item in ended
            ]
        )
    return found[0], found[1]


def messages(form: AnswerForm, texts: list[str]) -> tuple[object, object]:
    """The blocks of a message, without their ids, read whole and as a stream."""
    found = []
    for cut in (texts, ["".join(texts)]):
        blocks, reader = BlockEvents(form, shows_thinking=True), AnswerReader(form)
        events = []
        for number, text in enumerate(cut):
            events += blocks.push(reader.read(text, is_last=number == len(cut) - 1))
        events += blocks.finish()
        msgspec.json.encode(events)
        body = json.loads(msgspec.json.encode(merge_events(events)), parse_constant=_refused)
        found.append([{key: value for key, value in block.items() if key != "id"} for block in body])
    return found[0], found[1]


def _refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("encoded", [chat, responses, messages])
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_answer_can_be_sent_whole_and_as_a_stream(name, encoded, data):
    form = FORMS[name]
    answer = data.draw(answers(form))
    whole, streamed = encoded(form, cut_at(answer, data.draw(st.lists(st.integers(0, len(answer)), max_size=9))))
    assert whole == streamed


@pytest.mark.parametrize("encoded", [chat, responses, messages])
@pytest.mark.parametrize(
    "arguments", [r'{"input": "a\x"}', r'{"input": "a\u12"}', '{"input": "\t', "ls \\", '{"a": NaN}']
)
def test_what_a_model_writes_for_a_custom_tool_can_be_sent(encoded, arguments):
    answer = f"<|channel|>commentary to=functions.run <|constrain|>json<|message|>{arguments}<|call|>"
    for texts in ([answer], list(answer)):
        whole, streamed = encoded(FORMS["HARMONY_CALLS, free"], texts)
        assert whole == streamed
