"""Answers in parts: thinking, text and calls."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.answer_parts import AnswerForm, AnswerParser, CallArguments, CallBegins, Piece, Reasoning
from quire.text.thinking import FORMATS, ThinkingFormat, thinking_of
from quire.text.tools import HERMES
from tests.text.templates import TEMPLATES

THINK = ThinkingFormat("<think>", "</think>")
CALL = '<tool_call>\n{"name": "now", "arguments": {"at": "</think>"}}\n</tool_call>'


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind in one."""
    found: list[Piece] = []
    for kind, group in itertools.groupby(pieces, lambda piece: (type(piece), getattr(piece, "number", 0))):
        run = list(group)
        if kind[0] is str:
            found.append("".join(run))
        elif kind[0] is Reasoning:
            found.append(Reasoning("".join(piece.text for piece in run)))
        elif kind[0] is CallArguments:
            found.append(CallArguments(kind[1], "".join(piece.text for piece in run)))
        else:
            found += run
    return found


def parse(form: AnswerForm, texts: list[str]) -> list[Piece]:
    parser = AnswerParser(form)
    return joined([piece for text in texts for piece in parser.push(text)] + parser.flush())


def every_cut_in_three(answer: str) -> list[list[str]]:
    return [
        [answer[:first], answer[first:second], answer[second:]]
        for first, second in itertools.combinations_with_replacement(range(len(answer) + 1), 2)
    ]


@pytest.mark.parametrize(
    ("answer", "opened", "expected"),
    [
        ("<think>\nIt is 2.\n\n So.\n</think>\n\nTwo.\n", False, [Reasoning("It is 2.\n\n So."), "Two.\n"]),
        ("It is 2.\n</think>\n\nTwo.", True, [Reasoning("It is 2."), "Two."]),
        ("<think>It is 2.</think>Two.", True, [Reasoning("It is 2."), "Two."]),
        ("<think>\n\n</think>\n\nTwo.", False, ["Two."]),
        (" \n<think>a < b </thin k></think>", False, [Reasoning("a < b </thin k>")]),
        ("<think>cut </thi", False, [Reasoning("cut </thi")]),
        ("<think>cut \n", False, [Reasoning("cut")]),
        ("<think", False, ["<think"]),
        (" <think", True, [Reasoning("<think")]),
        (" \n ", False, [" \n "]),
        (" \n ", True, []),
        ("\n Two <think>not thinking</think>", False, ["\n Two <think>not thinking</think>"]),
        (f"<think>so</think>\nI look.{CALL}", False,
         [Reasoning("so"), "I look.", CallBegins(0, "now"), CallArguments(0, '{"at": "</think>"}')]),
    ],
)  # fmt: skip
def test_thinking_is_found_however_the_answer_is_cut(answer, opened, expected):
    form = AnswerForm(thinking=THINK, calls=HERMES, begins_in_thinking=opened)
    for texts in [[answer], list(answer), *every_cut_in_three(answer)]:
        assert parse(form, texts) == expected


GRANITE = next(form for form in FORMATS if form.answer_begin)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>hm</think>\n<response>Two.\n</response>", [Reasoning("hm"), "Two.\n"]),
        ("<think>hm</think><response>a </respons</response>\n", [Reasoning("hm"), "a </respons\n"]),
        ("<think>hm</think> <respon", [Reasoning("hm"), "<respon"]),
        ("<think>hm</think><response>cut </resp", [Reasoning("hm"), "cut </resp"]),
        ("<think>hm</think>Two.", [Reasoning("hm"), "Two."]),
        ("<response>Two.</response>", ["<response>Two.</response>"]),
    ],
)
def test_marks_around_an_answer_after_thinking_are_no_part_of_it(answer, expected):
    for texts in [[answer], list(answer), *every_cut_in_three(answer)]:
        assert parse(AnswerForm(thinking=GRANITE), texts) == expected


marks_and_words = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<response>", "</response>", "<", "</", "think", ">", " ", "\n", "so", CALL]
    )
)


@given(st.data(), marks_and_words, st.booleans(), st.sampled_from([THINK, GRANITE]))
def test_pieces_do_not_depend_on_the_cuts(data, words, opened, thinking):
    answer = "".join(words)
    form = AnswerForm(thinking=thinking, calls=HERMES, begins_in_thinking=opened)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    texts = [answer[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(answer)])]
    assert parse(form, texts) == parse(form, [answer])


def test_an_answer_without_parts_is_its_text():
    assert parse(AnswerForm(), ["<think>a</think>", "", " b"]) == ["<think>a</think> b"]


def test_the_template_tells_how_the_model_thinks():
    assert thinking_of(TEMPLATES["qwen3"]) == thinking_of(TEMPLATES["deepseek"]) == THINK
    assert thinking_of("{{ '[THINK]' + reasoning + '[/THINK]' }}") == ThinkingFormat("[THINK]", "[/THINK]")
    assert thinking_of("write between <think></think> and between <response></response>") == GRANITE
    assert all(thinking_of(TEMPLATES[name]) is None for name in ("chatml", "llama3", "gemma", "mistral", "qwen2.5"))


@pytest.mark.parametrize("form", FORMATS, ids=[form.begin for form in FORMATS])
def test_a_prompt_that_opens_a_section_is_told_from_others(form):
    assert form.is_open_at_end_of(f"assistant: {form.begin}\n")
    assert not form.is_open_at_end_of(f"assistant: {form.begin}\n\n{form.end}\n\n")
    assert not form.is_open_at_end_of(f"user: what is {form.begin}?\nassistant: ")


@given(st.data(), st.text(max_size=12) | st.sampled_from(['"\\', "\U0001f600\n\ud7ff", '}"', "</tool_call>"]))
def test_the_input_of_a_custom_tool_is_its_text(data, text):
    for ascii_only in (True, False):
        arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
        answer = f'<tool_call>\n{{"name": "shell", "arguments": {arguments}}}\n</tool_call>'
        cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
        texts = [answer[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(answer)])]
        form = AnswerForm(calls=HERMES, tools={"shell": {}}, custom=frozenset({"shell"}))
        expected = [CallBegins(0, "shell"), *([CallArguments(0, text)] if text else [])]
        assert parse(form, texts) == expected
