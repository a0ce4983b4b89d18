"""The pieces of an answer as content blocks, and messages of blocks as conversations."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.api.anthropic.blocks import BlockEvents, merge_events
from quire.server.api.anthropic.conversation import TurnBuilder
from quire.server.api.anthropic.responses import TextBlock, ThinkingBlock, ToolUseBlock
from quire.text.answer_parts import PLAIN, CallArguments, CallBegins, Piece, Reasoning
from quire.text.cut_object import complete_object

values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=4)
parts = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.text(min_size=1, max_size=12)),
        st.tuples(st.just("thinking"), st.text(min_size=1, max_size=12)),
        st.tuples(st.just("call"), objects),
    ),
    max_size=5,
)


def pieces_of(wanted: list, cuts: list[int]) -> list[Piece]:
    """The parts of an answer as a parser gives them, in as many pieces as `cuts` has it."""
    pieces: list[Piece] = []
    number = -1
    for kind, content in wanted:
        text = json.dumps(content) if kind == "call" else content
        if kind == "call":
            number += 1
            pieces.append(CallBegins(number, f"tool_{number}"))
        while text:
            size = cuts[len(pieces) % len(cuts)] if cuts else len(text)
            piece, text = text[:size], text[size:]
            pieces.append(
                CallArguments(number, piece) if kind == "call" else Reasoning(piece) if kind == "thinking" else piece
            )
    return pieces


def merged_parts(wanted: list) -> list[tuple]:
    """Neighbours of one kind are one part, but for calls."""
    merged: list[tuple] = []
    for kind, content in wanted:
        if merged and merged[-1][0] == kind != "call":
            merged[-1] = (kind, merged[-1][1] + content)
        else:
            merged.append((kind, content))
    return merged


def blocks_of(pieces: list[Piece], **options: bool) -> list:
    events = BlockEvents(PLAIN, **{"shows_thinking": True} | options)
    found = [event for piece in pieces for event in events.push([piece])] + events.finish()
    open_block = None
    for event in found:  # blocks are opened and closed one after the other
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        assert event["index"] == open_block
        if event["type"] == "content_block_stop":
            open_block = None
    assert open_block is None
    return merge_events(found)


@given(wanted=parts, cuts=st.lists(st.integers(1, 4), max_size=5))
def test_blocks_do_not_depend_on_how_an_answer_is_cut(wanted, cuts):
    found = blocks_of(pieces_of(wanted, cuts))
    merged = merged_parts(wanted)
    if len(merged) > 1:  # blanks alone are no block beside others
        merged = merged_parts([part for part in merged if part[0] != "text" or not part[1].isspace()])
    assert len(found) == len(merged)
    for block, (kind, content) in zip(found, merged, strict=True):
        if kind == "text":
            assert block == TextBlock(text=content)
        elif kind == "thinking":
            assert (block.thinking, bool(block.signature)) == (content, True)
        else:
            assert isinstance(block, ToolUseBlock)
            assert json.loads(bytes(block.input)) == content
    whole = blocks_of(pieces_of(wanted, []))
    signatures = [block.signature for block in whole if isinstance(block, ThinkingBlock)]
    assert signatures == [block.signature for block in found if isinstance(block, ThinkingBlock)]


def test_blanks_alone_are_a_block_only_where_there_is_nothing_else():
    assert blocks_of(["\n", "\n", CallBegins(0, "f"), CallArguments(0, "{}"), "\n"])[0].name == "f"
    assert blocks_of(["\n", " ", "a", "\n"]) == [TextBlock(text="\n a\n")]
    assert blocks_of(["\n", " "]) == [TextBlock(text="\n ")]
    assert blocks_of([]) == []


def test_thinking_is_left_out_where_it_was_not_asked_for():
    pieces = [Reasoning("hm"), "yes", CallBegins(0, "f"), CallArguments(0, "{}")]
    assert [type(block) for block in blocks_of(pieces, shows_thinking=False)] == [TextBlock, ToolUseBlock]
    thinking, *_ = blocks_of(pieces, omits_thoughts=True)
    assert thinking.thinking == ""
    assert thinking.signature


@given(whole=objects, indent=st.sampled_from([None, 1]))
def test_of_an_object_that_was_cut_off_the_complete_fields_are_left(whole, indent):
    text = json.dumps(whole, indent=indent)
    assert complete_object(text) == text
    most = 0
    for size in range(len(text)):
        found = json.loads(complete_object(text[:size]))
        assert list(found.items()) == list(whole.items())[: len(found)]
        assert len(found) >= most
        most = len(found)


def test_numbers_are_left_as_they_are_written():
    text = '{"n": 100000000000000000000000000000000, "x": 1.50, "y": 1e400}'
    assert complete_object(text) == text
    assert complete_object(text[:-3]) == text[: text.index(', "y"')] + "}"


def test_numbers_may_have_any_length_and_constants_are_no_json():
    text = f'{{"n": {"9" * 5000}}}'
    assert complete_object(text) == text
    for constant in ("NaN", "Infinity", "-Infinity"):
        assert complete_object(f'{{"a": [1], "b": {constant}}}') == '{"a": [1]}'


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "5", "{]", '{"a"', '{"a":', '{"a": 1', "nonsense", "{1: 2}", "{[]: 1}", '{"a" 1}', "[" * 9999],
)
def test_what_is_no_object_has_no_fields(text):
    assert complete_object(text) == "{}"


def conversation_of(messages: list, system: object = None) -> list[dict]:
    conversation = TurnBuilder()
    conversation.add_system(system)
    conversation.add_messages(messages)
    return conversation.messages


def test_messages_of_one_role_in_a_row_are_one_turn():
    found = conversation_of(
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "d"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "e"}, {"type": "text", "text": "f"}]},
            {"role": "user", "content": []},
        ],
        "s",
    )
    assert found == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nbc"},
        {"role": "assistant", "content": "d\n\nf", "reasoning_content": "e"},
        {"role": "user", "content": ""},
    ]


def test_calls_and_results_are_messages_as_templates_know_them():
    calls = [{"type": "tool_use", "id": f"t{n}", "name": f"f{n}", "input": {"n": n}} for n in range(2)]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "gone", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t0"},
        {"type": "text", "text": "go on"},
    ]
    thought = [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "hm", "signature": "y"}]
    found = conversation_of(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [*thought, *calls]},
            {"role": "user", "content": results},
        ]
    )
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": f"t{n}", "type": "function", "function": {"name": f"f{n}", "arguments": f'{{"n": {n}}}'}}
                for n in range(2)
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "f1", "content": "Error: gone"},
        {"role": "tool", "tool_call_id": "t0", "name": "f0", "content": ""},
        {"role": "user", "content": "go on"},
    ]
