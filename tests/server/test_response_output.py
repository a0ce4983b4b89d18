"""Output items of a response, and their events, out of the pieces of an answer."""

import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from quire.server.api.responses.output import Output
from quire.text.answer_parts import PLAIN, CallArguments, CallBegins, Piece, Reasoning


class Recorder:
    def __init__(self, **options: bool) -> None:
        self.output = Output(PLAIN, **{"is_streamed": True, "is_sealed": False, "pads": False} | options)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, *steps: list[Piece], is_cut: bool = False) -> list[dict[str, Any]]:
        for pieces in steps:
            self.output.add(pieces)
        self.output.finish(is_cut=is_cut)
        self.events = self.output.take_events()
        return [json.loads(item.json) for item in self.output.items]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def test_an_answer_of_every_kind_has_the_events_of_openai_in_order():
    recorder = Recorder()
    reasoning, message, call = recorder.write(
        [Reasoning("so ")], [Reasoning("be it")], ["hi"], [" you"], [CallBegins(0, "f")], [CallArguments(0, "{}")]
    )
    assert recorder.names == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [fields["output_index"] for _, fields in recorder.events] == [0] * 7 + [1] * 7 + [2] * 4
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "so be it"}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "hi you")
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", "{}")
    assert {item["status"] for item in (reasoning, message, call)} == {"completed"}
    done = [fields["item"] for name, fields in recorder.events if name == "output_item.done"]
    assert done == [reasoning, message, call]


def test_blanks_between_parts_are_no_message_and_blanks_before_text_stay():
    assert [item["type"] for item in Recorder().write([Reasoning("a"), "\n"], [CallBegins(0, "f")])] == [
        "reasoning",
        "function_call",
    ]
    assert Recorder().write(["\n"], [" "], ["a"])[0]["content"][0]["text"] == "\n a"
    assert Recorder().write(["a"], ["\n"], ["b"])[0]["content"][0]["text"] == "a\n b".replace(" ", "")


def test_an_answer_of_nothing_is_an_empty_message_and_one_of_blanks_keeps_them():
    for steps, text in (([], ""), ([["\n"]], "\n")):
        recorder = Recorder()
        (item,) = recorder.write(*steps)
        assert item["content"][0]["text"] == text
        assert recorder.names[0] == "output_item.added"
        assert recorder.names[-1] == "output_item.done"


def test_the_last_item_of_an_answer_that_was_cut_is_incomplete():
    items = Recorder().write([Reasoning("a")], [CallBegins(0, "f")], [CallArguments(0, '{"a":')], is_cut=True)
    assert [item["status"] for item in items] == ["completed", "incomplete"]


def test_log_probabilities_are_those_of_the_tokens_of_the_text():
    recorder = Recorder()
    recorder.output.add([Reasoning("a")], "in thinking")
    recorder.output.add([], "a part of the mark")
    recorder.output.add([Reasoning("b"), "x"], "the last of the mark")
    recorder.output.add([], "half of a letter")
    recorder.output.add(["é"], "the other half")
    recorder.output.add([], "the end")
    recorder.write()
    deltas = [fields["logprobs"] for name, fields in recorder.events if name == "output_text.delta"]
    assert deltas == [[], ["half of a letter", "the other half"]]
    message = json.loads(recorder.output.items[1].json)
    assert message["content"][0]["logprobs"] == ["half of a letter", "the other half", "the end"]


def test_padding_hides_the_length_of_a_delta_and_nothing_else_changes():
    recorder = Recorder(pads=True)
    recorder.write(["a"], ["a longer text"], ["é" * 40])
    deltas = [fields for name, fields in recorder.events if name == "output_text.delta"]
    assert {len(fields["delta"].encode()) + len(fields["obfuscation"]) for fields in deltas} == {64, 128}


def test_sealed_thinking_is_in_the_item_when_it_is_done():
    recorder = Recorder(is_sealed=True)
    (item,) = recorder.write([Reasoning("hm")])
    assert item["encrypted_content"] == "quire:aG0="


PIECES = st.lists(
    st.one_of(
        st.text(alphabet="a \n", min_size=1), st.builds(Reasoning, st.text(alphabet="b", min_size=1)), st.just("call")
    ),
    max_size=12,
)


@given(PIECES, st.data())
def test_items_do_not_depend_on_how_their_text_is_split(pieces, data):
    whole: list[Piece] = []
    number = 0
    for piece in pieces:
        if piece == "call":
            whole += [CallBegins(number, "f"), CallArguments(number, '{"a": 1}')]
            number += 1
        else:
            whole.append(piece)
    split: list[Piece] = []
    for piece in whole:
        text = piece if isinstance(piece, str) else getattr(piece, "text", "")
        at = data.draw(st.integers(0, len(text)))
        halves = [text[:at], text[at:]]
        if isinstance(piece, str):
            split += [half for half in halves if half]
        else:
            split += (
                [piece] if isinstance(piece, CallBegins) else [piece._replace(text=half) for half in halves if half]
            )
    one, two = Recorder().write(whole), Recorder()
    other = two.write(*[[piece] for piece in split])
    assert [_without_ids(item) for item in one] == [_without_ids(item) for item in other]
    for index, item in enumerate(other):  # what was streamed is what the item has
        parts = [fields["delta"] for name, fields in two.events
                 if name.endswith(".delta") and fields["output_index"] == index]  # fmt: skip
        assert "".join(parts) == item.get(
            "arguments", item.get("content", [{}])[0].get("text") if "content" in item else None
        )


def _without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if not key.endswith("id")}
