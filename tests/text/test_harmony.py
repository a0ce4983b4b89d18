"""Answers of gpt-oss: thinking, text and calls on channels."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.grammar.answers import AnswerRules, CallRules
from quire.grammar.lark import mark_tokens
from quire.request import Grammar, GrammarKind
from quire.text.answer_parts import AnswerForm, AnswerParser, CallArguments, CallBegins, Piece, Reasoning
from quire.text.chat import ChatTemplate
from quire.text.thinking import HARMONY, thinking_of
from quire.text.tools import HARMONY_CALLS, Tool, format_of
from tests.text.templates import TEMPLATES
from tests.text.test_answer_grammar import accepts, vocabulary
from tests.text.test_answer_parts import every_cut_in_three, joined

FORM = AnswerForm(HARMONY, HARMONY_CALLS, tools={"weather": {}, "now": {}})
THOUGHT = "<|channel|>analysis<|message|>It rains.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "<b>Rome"}<|call|>'
NEXT = "<|start|>assistant"
ANSWERS: dict[str, tuple[str, list[Piece]]] = {
    "thinking": (
        f"{THOUGHT}{NEXT}<|channel|>final<|message|>Take a <coat>.<|return|>",
        [Reasoning("It rains."), "Take a <coat>."],
    ),
    "no last mark": (f"{THOUGHT}{NEXT}<|channel|>final<|message|>Dry\n", [Reasoning("It rains."), "Dry\n"]),
    "no thinking": ("<|channel|>final<|message|>Hi.<|return|>", ["Hi."]),
    "call": (
        f"{THOUGHT}{NEXT}{CALL}",
        [Reasoning("It rains."), CallBegins(0, "weather"), CallArguments(0, '{"city": "<b>Rome"}')],
    ),
    "role": (
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        [CallBegins(0, "now"), CallArguments(0, "{}")],
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.now<|message|><|call|>",
        [CallBegins(0, "now"), CallArguments(0, "{}")],
    ),
    "remark": (
        f"<|channel|>commentary<|message|>I look it up.<|end|>{NEXT}{CALL}",
        ["I look it up.", CallBegins(0, "weather"), CallArguments(0, '{"city": "<b>Rome"}')],
    ),
    "two of each": (
        f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}<|channel|>final<|message|>a<|end|>{NEXT}<|channel|>final<|message|>b",
        [Reasoning("It rains.\n\nIt rains."), "a\n\nb"],
    ),
    "no end": (f"<|channel|>analysis<|message|>So{NEXT}<|channel|>final<|message|>Yes", [Reasoning("So"), "Yes"]),
    "own tool": ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
    "no channels": ("assistants are <|odd|>, to=you", ["assistants are <|odd|>, to=you"]),
    "cut header": (f"{THOUGHT}{NEXT}<|channel|>fin", [Reasoning("It rains.")]),
    "cut mark": ("<|channel|>final<|message|>Hi.<|retur", ["Hi.<|retur"]),
    "space after text": ("<|channel|>final<|message|>Hi.<|end|>\n", ["Hi."]),
    "space after thinking": (f"{THOUGHT}\n", [Reasoning("It rains.")]),
    "space after a call": (f"{CALL} ", [CallBegins(0, "weather"), CallArguments(0, '{"city": "<b>Rome"}')]),
    "no space in the header": (
        "assistantto=functions.now<|channel|>commentary<|constrain|>json<|message|>{}",
        [CallBegins(0, "now"), CallArguments(0, "{}")],
    ),
    "two recipients": (
        "to=a<|channel|>commentary to=functions.now json<|message|>{}<|call|>",
        [CallBegins(0, "now"), CallArguments(0, "{}")],
    ),
    "two words after the channel": ("<|channel|>final a b<|message|>Hi.", ["<|channel|>final a b<|message|>Hi."]),
    "recipient of two words": ("to=a b<|channel|>final<|message|>Hi.", ["to=a b<|channel|>final<|message|>Hi."]),
    "no channel": ("to=functions.now<|message|>Hi.", ["to=functions.now<|message|>Hi."]),
    "long header": (f"to={'x' * 600}<|channel|>final<|message|>Hi.", [f"to={'x' * 600}<|channel|>final<|message|>Hi."]),
}


def parse(texts: list[str], form: AnswerForm = FORM) -> list[Piece]:
    parser = AnswerParser(form)
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.flush()
    assert parser.num_calls == sum(isinstance(piece, CallBegins) for piece in pieces)
    return joined(pieces)


@pytest.mark.parametrize("name", ANSWERS)
def test_parts_are_found_wherever_the_answer_is_cut(name: str) -> None:
    answer, expected = ANSWERS[name]
    cuts = (
        every_cut_in_three(answer) if len(answer) < 100 else [[answer[:at], answer[at:]] for at in range(len(answer))]
    )
    for texts in ([answer], list(answer), *cuts):
        assert parse(texts) == expected, texts


FRAGMENTS = [
    *HARMONY.parts,
    "<|st",
    "assistant",
    "to=functions.now",
    "analysis",
    "final",
    "commentary",
    " ",
    "{}",
    "so",
    "x" * 200,
]


@settings(max_examples=300)
@given(st.data())
def test_parts_do_not_depend_on_the_cuts(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from([*FRAGMENTS, *(answer for answer, _ in ANSWERS.values())]), max_size=8))
    answer = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    texts = [answer[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(answer)])]
    assert parse(texts) == parse([answer])


@pytest.mark.parametrize("header", [f"{' ' * 480}!", f"<|channel|>final{' ' * 480}!"])
def test_a_run_of_spaces_is_read_once(header: str) -> None:
    """Divided in all ways between the parts of a header, it would take half a minute."""
    answer = f"{header}<|message|>Hi."
    assert parse([answer]) == [answer]


def test_text_that_is_on_no_channel_is_not_lost() -> None:
    assert parse(["Hello there."]) == ["Hello there."]
    assert parse([THOUGHT, "Hello."]) == [Reasoning("It rains."), "Hello."]


def test_a_message_to_a_function_is_text_where_there_are_none() -> None:
    assert parse([CALL], AnswerForm(HARMONY)) == ['{"city": "<b>Rome"}']


def test_a_prompt_may_have_begun_a_message() -> None:
    assert parse(["nd more.<|end|>", NEXT, CALL], AnswerForm(None, HARMONY_CALLS))[0] == "nd more."
    opened = AnswerForm(HARMONY, begins_in_thinking=True)
    assert parse([f"So.<|end|>{NEXT}<|channel|>final<|message|>Yes"], opened) == [Reasoning("So."), "Yes"]


def test_the_parser_knows_when_it_thinks() -> None:
    parser = AnswerParser(FORM)
    seen = []
    for text in ("<|channel|>analysis", "<|message|>So", "<|end|>", f"{NEXT}<|channel|>final<|message|>a"):
        parser.push(text)
        seen.append(parser.is_thinking)
    assert seen == [False, True, False, False]


def test_the_template_shows_the_format_and_the_history_of_calls() -> None:
    source = (Path(__file__).parent / "chat_templates" / "harmony.jinja").read_text()
    assert thinking_of(source) is HARMONY
    assert format_of(source) is HARMONY_CALLS
    template = ChatTemplate(source, special_tokens={})
    assert template.call_format is HARMONY_CALLS
    assert template.call_support[True].is_full
    others = [name for name, other in TEMPLATES.items() if thinking_of(other) is HARMONY]
    assert others == ["harmony"]


def test_answers_follow_the_grammar() -> None:
    """The marks are tokens in every vocabulary of the family."""
    tokenizer = vocabulary(*HARMONY.parts)
    marks = mark_tokens(tokenizer, HARMONY.parts)
    tools = [Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})]
    free = AnswerRules(CallRules(tools, HARMONY_CALLS, required=False, parallel=True), thinking=HARMONY).grammar(marks)
    called = AnswerRules(CallRules(tools, HARMONY_CALLS, required=True, parallel=True), thinking=HARMONY).grammar(marks)
    call, final = CALL.removesuffix("<|call|>"), "<|channel|>final<|message|>Rain."
    remark = f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}"
    for before in ("", f"{THOUGHT}{NEXT}", f"{THOUGHT}{NEXT}{remark}"):
        assert accepts(free, before + call, tokenizer)
        assert accepts(free, before + final, tokenizer)
        assert accepts(called, before + call, tokenizer)
        assert not accepts(called, before + final, tokenizer)
        assert not accepts(free, before + call.replace("city", "town"), tokenizer)
        assert not accepts(free, before + call.replace("weather", "other"), tokenizer)
    as_json = Grammar(
        GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    structured = AnswerRules(plain=as_json, thinking=HARMONY).grammar(marks)
    assert accepts(structured, f'{THOUGHT}{NEXT}<|channel|>final<|message|>{{"a": 1}}', tokenizer)
    assert not accepts(structured, f"{THOUGHT}{NEXT}{final}", tokenizer)
    continued = AnswerRules(CallRules(tools, HARMONY_CALLS, required=False, parallel=True)).grammar(marks)
    assert accepts(continued, f"nd more.<|end|>{NEXT}{call}", tokenizer)
    assert accepts(continued, "nd more.", tokenizer)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":"a\\nb"}', "a\nb"),
        ('{"input": "a\\nb"}', "a\nb"),
        ('{\n  "input" : "a\\nb"\n}', "a\nb"),
        ('{"input": "a\\xb\\u12\nc"}', "a\\xb\\u12\nc"),  # escapes and characters that JSON does not have
        ('{"input": "\\ud83d\\ude00\\ude00\\ud83d"}', "\U0001f600\ufffd\ufffd"),
        ('{"input": "a', "a"),
        ('{"input": "a"} b', "a"),
        ("{}", ""),
        ("ls -l {", "ls -l {"),
        ('{"cmd": "ls"}', '{"cmd": "ls"}'),
        ('{"input": ["ls"]}', '{"input": ["ls"]}'),
        ('{"inp', '{"inp'),
    ],
)
def test_the_input_of_a_custom_tool_is_what_the_model_writes(arguments: str, text: str) -> None:
    form = AnswerForm(thinking=HARMONY, calls=HARMONY_CALLS, tools={"shell": {}}, custom=frozenset({"shell"}))
    answer = f"<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{arguments}<|call|>"
    expected = [CallBegins(0, "shell"), *([CallArguments(0, text)] if text else [])]
    for texts in ([answer], list(answer)):
        parser = AnswerParser(form)
        pieces = [piece for text in texts for piece in parser.push(text)] + parser.flush()
        assert joined(pieces) == expected
