"""Calls in the formats of model families, however the answer is cut and whatever becomes of it."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.call_parser import CallParser
from quire.text.tools import GEMMA4, GLM, PYTHONIC, QWEN3_CODER
from tests.text.recorded_answers import ANSWERS, TOOLS
from tests.text.test_tools import read

CASES = pytest.mark.parametrize("name", ANSWERS)


def parse(form, texts, guided):
    parser = CallParser(form, TOOLS, guided=guided)
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.flush()
    text, calls = read(pieces)
    assert parser.num_calls == len(calls)
    return text, calls


@CASES
@pytest.mark.parametrize("guided", [True, False])
def test_calls_are_found_wherever_the_answer_is_cut(name, guided):
    form, answer, text, calls = ANSWERS[name]
    cuts = [[answer[:at], answer[at:]] for at in range(len(answer) + 1)]
    for texts in [list(answer), *cuts]:
        found_text, found = parse(form, texts, guided)
        assert (found_text, [(name, json.loads(arguments)) for name, arguments in found]) == (text, calls)


@CASES
@pytest.mark.parametrize("guided", [True, False])
def test_an_answer_that_ends_early_is_the_same_wherever_it_is_cut(name, guided):
    form, answer, _, calls = ANSWERS[name]
    for end in range(len(answer)):
        early = answer[:end]
        whole = parse(form, [early], guided)
        assert parse(form, list(early), guided) == whole
        if not guided:  # calls are whole, and the rest is there as text
            assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == calls[: len(whole[1])]
            assert whole[1] or whole[0] == early


@CASES
def test_what_follows_a_call_that_breaks_off_is_not_lost(name):
    form, answer, _, _ = ANSWERS[name]
    for end in range(1, len(answer), 3):
        text, calls = parse(form, [answer[:end], "\0 and more"], guided=False)
        assert text.endswith("\0 and more")
        assert calls or text == answer[:end] + "\0 and more"


FRAGMENTS = sorted({part for case in ANSWERS.values() for mark in case.form.first_marks for part in (mark, mark[:3])})


@settings(max_examples=300)
@given(st.data(), st.sampled_from(list(ANSWERS.values())), st.booleans())
def test_calls_do_not_depend_on_the_cuts(data, case, guided):
    words = data.draw(
        st.lists(st.sampled_from([*FRAGMENTS, case.answer, case.answer[:20], case.answer[7:], " ", "\n", "so", "{"]))
    )
    answer = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    texts = [answer[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(answer)])]
    assert parse(case.form, texts, guided) == parse(case.form, [answer], guided)


@pytest.mark.parametrize(
    ("key", "value"),
    [("at", '{"a": "\\ud800"}'), ("tags", "1e999"), ("tags", "[1e999]"), ("tags", "1.00000000000000000001")],
)
@pytest.mark.parametrize("form", [QWEN3_CODER, GLM])
def test_values_that_are_written_one_by_one_stay_as_they_are_written(form, key, value):
    name = "weather" if key == "at" else "note"
    answer = f"<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    if form is QWEN3_CODER:
        answer = f"<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for guided in (True, False):
        _, [(_, arguments)] = parse(form, [answer], guided)
        assert arguments == f'{{"{key}": {value}}}'
        arguments.encode()


@pytest.mark.parametrize("key", ["$filter", "first name", "xml:lang", "a=b", "größe", "k" * 200])
@pytest.mark.parametrize(
    ("form", "answer"),
    [(PYTHONIC, '[f(id=1, {}="x")]'), (GEMMA4, '<|tool_call>call:f{{id:1,{}:<|"|>x<|"|>}}<tool_call|>')],
)
def test_names_of_arguments_may_have_any_characters(form, answer, key):
    tools = {"f": {"type": "object", "properties": {"id": {"type": "integer"}, key: {"type": "string"}}}}
    for guided in (True, False):
        parser = CallParser(form, tools, guided=guided)
        text, [(name, arguments)] = read(parser.push(answer.format(key)) + parser.flush())
        assert (text, name, json.loads(arguments)) == ("", "f", {"id": 1, key: "x"})


@pytest.mark.parametrize(
    ("schema", "value"),
    [({"$ref": "#/$defs/size"}, "1"), ({"const": "1"}, "1"), ({"$ref": "#/$defs/count"}, 1), ({"$ref": "#/other"}, 1)],
)
def test_the_type_of_a_value_is_found_behind_references(schema, value):
    definitions = {"size": {"type": "string", "enum": ["1", "2"]}, "count": {"anyOf": [{"type": "integer"}]}}
    tools = {"f": {"type": "object", "properties": {"b": schema}, "$defs": definitions}}
    parser = CallParser(GLM, tools)
    pieces = parser.push("<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n</tool_call>")
    assert json.loads(read(pieces)[1][0][1]) == {"b": value}
