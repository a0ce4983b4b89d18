"""The formats of calls, and the parser that finds them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.call_history import with_tools_in_system_prompt
from quire.text.call_parser import CallParser
from quire.text.pieces import CallArguments, CallBegins, Piece
from quire.text.tools import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM,
    GRANITE,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    PHI4,
    PYTHONIC,
    QWEN3_CODER,
    SECTION_BEGIN,
    format_of,
)
from tests.text.templates import TEMPLATES

FORMS = {"hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA3}
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=6)
values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=8), st.sampled_from(["}", '"', "\\", "]}", "</tool_call>"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=3), values, max_size=3)


def written(form, calls):
    text = [form.opening(name) + json.dumps(arguments, ensure_ascii=False) + "}" for name, arguments in calls]
    return form.begin + (form.between or "").join(text) + form.end


def read(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        elif isinstance(piece, CallBegins):
            assert piece.number == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            name, so_far = calls[piece.number]
            calls[piece.number] = name, so_far + piece.text
    return text, calls


@given(st.data(), st.sampled_from(list(FORMS.values())))
def test_calls_are_found_however_the_answer_is_cut(data, form):
    calls = data.draw(st.lists(st.tuples(names, arguments), min_size=1, max_size=3 if form.between else 1))
    before = data.draw(st.sampled_from(["", "I see. ", "a < b, <tool_cal"])) if form.begin else ""
    answer = before + written(form, calls)
    parser = CallParser(form)
    pieces: list[Piece] = []
    at = 0
    while at < len(answer):
        size = data.draw(st.integers(1, 9))
        pieces += parser.push(answer[at : at + size])
        at += size
    pieces += parser.flush()
    text, found = read(pieces)
    assert text == before
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert parser.num_calls == len(calls)


@given(st.text(max_size=30), st.integers(1, 5), st.sampled_from(list(FORMS.values())))
def test_an_answer_without_calls_is_text(answer, size, form):
    answer = answer.lstrip("{")
    parser = CallParser(form)
    pieces = [piece for at in range(0, len(answer), size) for piece in parser.push(answer[at : at + size])]
    assert read(pieces + parser.flush()) == (answer, [])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_call_that_is_cut_off_has_the_arguments_that_came(form):
    parser = CallParser(form)
    cut = written(form, [("weather", {"city": "Rome"})])[: -len('me"}}' + form.end)]
    assert read(parser.push(cut) + parser.flush()) == ("", [("weather", '{"city": "Ro')])


def test_the_template_tells_how_calls_are_written():
    told = {name: format_of(source) for name, source in TEMPLATES.items()}
    assert told["mistral"] is MISTRAL
    assert told["llama3"] is LLAMA3
    assert all(told[name] is HERMES for name in ("qwen2.5", "qwen3", "chatml", "gemma"))


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>{...}</tool_call>", HERMES),
        ("<tool_call> <function=name> <parameter=key>", QWEN3_CODER),
        ("<tool_call>{name} <arg_key> <arg_value>", GLM),
        ("[TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS] [ARGS]", MISTRAL_NAMED),
        ("<|tool_call|>", GRANITE),
        ("<|tool|> <|/tool|>", PHI4),
        (f"{SECTION_BEGIN} ```json", DEEPSEEK_FENCED),
        (SECTION_BEGIN, DEEPSEEK),
        ("ipython {% for t in tools %}", LLAMA3),
        ("[func_name1(params_name1=params_value1)] ipython tools", PYTHONIC),
        ("<start_function_call>", FUNCTION_GEMMA),
        ("<|tool_call>call:", GEMMA4),
        ("nothing of the kind", HERMES),
    ],
)
def test_every_format_is_found_by_the_template(template, form):
    assert format_of(template) is form


def test_a_conversation_about_tools_can_be_with_tools_in_system_prompt():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    system, user, assistant, tool = with_tools_in_system_prompt(conversation, [{"name": "weather"}])
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    assert '\n{"name": "weather"}\n' in system["content"]
    assert user == conversation[1]
    assert assistant == {"role": "assistant", "content": written(HERMES, [("weather", {"city": "Rome"})])}
    assert tool == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}


def test_contents_in_parts_are_told_as_their_text():
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    conversation = [
        {"role": "system", "content": parts("Be ", "brief.")},
        {"role": "assistant", "content": parts("I ", "look."), "tool_calls": [call]},
        {"role": "tool", "content": parts("sun", "ny")},
    ]
    system, assistant, tool = with_tools_in_system_prompt(conversation, [{"name": "weather"}])
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    assert assistant["content"] == "I look.\n" + written(HERMES, [("weather", {"city": "Rome"})])
    assert tool["content"] == "<tool_response>\nsunny\n</tool_response>"
