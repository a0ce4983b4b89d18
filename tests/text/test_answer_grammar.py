"""The grammar of answers: thinking, text and calls in every format."""

import json
from dataclasses import replace
from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.grammar.answers import AnswerRules, CallRules
from quire.grammar.lark import mark_tokens
from quire.grammar.matcher import Grammars
from quire.request import Grammar, ThinkingBudget, json_schema, regex
from quire.text.answer_parts import AnswerForm, AnswerParser, Reasoning
from quire.text.call_parser import CallParser
from quire.text.thinking import ThinkingFormat
from quire.text.tokenizer import Tokenizer
from quire.text.tools import (
    FUNCTION_GEMMA,
    GEMMA4,
    GLM,
    HERMES,
    LLAMA3,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    CallFormat,
    Tool,
)
from tests.text import vocabularies
from tests.text.recorded_answers import ANSWERS
from tests.text.test_tools import FORMS, read, written
from tests.text.token_ids import named_id
from tests.text.walk import Walk

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", CITY), Tool("now", {})]
RECORDED_TOOLS = [
    Tool("weather", {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    }),
    Tool("now", {}),
    Tool("note", {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "tags": {"type": "array", "items": {"type": ["integer", "boolean", "string", "object"]}},
        },
        "required": ["text"],
    }),
]  # fmt: skip
THINK = ThinkingFormat("<think>", "</think>")
ANSWER = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def vocabulary(*marks: str) -> Tokenizer:
    """A vocabulary in which these are tokens of their own."""
    backend = vocabularies.byte_level_original("qwen2")
    backend = type(backend).from_str(backend.to_str())
    backend.add_tokens([mark for mark in marks if mark.startswith("<")])
    backend.add_special_tokens([mark for mark in marks if not mark.startswith("<")])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary()


def accepts(grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    end = named_id(tokenizer, "eos_token")
    walk = Walk(Grammars(lambda: tokenizer, [end], tokenizer.vocab_size).matcher(grammar))
    mask = walk.after()
    for token in [*tokenizer.encode(text, add_special_tokens=False), end]:
        if not int.from_bytes(mask, "little") >> token & 1:
            return False
        if token == end:
            break
        mask = walk.after([token])
    return True


def calls_grammar(tools: list[Tool], form: CallFormat, *, required: bool, parallel: bool) -> Grammar:
    return AnswerRules(CallRules(tools, form, required=required, parallel=parallel)).grammar({})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_answers_are_calls_where_they_must_be(form, tokenizer):
    grammar = calls_grammar(TOOLS, form, required=True, parallel=False)
    one = written(form, [("weather", {"city": "Rome"})])
    assert accepts(grammar, one, tokenizer)
    assert accepts(grammar, written(form, [("now", {})]), tokenizer)
    assert not accepts(grammar, "Hello.", tokenizer)
    assert not accepts(grammar, "I see. " + one, tokenizer)
    assert not accepts(grammar, written(form, [("now", {"city": "Rome"})]), tokenizer)
    assert not accepts(grammar, written(form, [("other", {})]), tokenizer)
    assert not accepts(grammar, one[:-1], tokenizer)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_answers_are_text_or_calls_where_they_may_be(form, tokenizer):
    grammar = calls_grammar(TOOLS, form, required=False, parallel=True)
    one = written(form, [("weather", {"city": "Rome"})])
    assert accepts(grammar, "Hello {there}.", tokenizer)
    assert accepts(grammar, one, tokenizer)
    assert not accepts(grammar, written(form, [("other", {})]), tokenizer)
    assert not accepts(grammar, one + " Done.", tokenizer)
    if form.begin:
        assert accepts(grammar, "I see. " + one, tokenizer)
        assert accepts(grammar, written(form, [("now", {}), ("weather", {"city": "Rome"})]), tokenizer)
        alone = calls_grammar(TOOLS, form, required=False, parallel=False)
        assert not accepts(alone, written(form, [("now", {}), ("weather", {"city": "Rome"})]), tokenizer)


# Some recorded answers are not in their format's own words.
EXACT = [
    "hermes", "hermes in parallel", "qwen3-coder", "llama 3.1", "mistral v11", "granite 3", "phi 4", "deepseek r1",
    "deepseek v3.1", "glm 4.5", "functiongemma", "gemma 4",
]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_answers_in_every_format_follow_its_grammar(name, has_tokens):
    form, answer, text, calls = ANSWERS[name]
    tokenizer = vocabulary(*form.marks) if has_tokens else vocabulary()
    marks = mark_tokens(tokenizer, form.marks)
    assert len(marks) == (len(form.marks) if has_tokens else 0)
    rules = CallRules(RECORDED_TOOLS, form, required=not text, parallel=True)
    grammar = AnswerRules(rules).grammar(marks)
    assert accepts(grammar, answer.removesuffix("\n"), tokenizer)
    name = calls[0][0]
    assert not accepts(grammar, answer.replace(name, "other", 1).removesuffix("\n"), tokenizer)
    assert not accepts(grammar, answer + "?", tokenizer) or answer.endswith("\n")


def test_arguments_that_come_one_by_one_are_those_of_the_schema(tokenizer):
    tool = Tool("f", {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}, "c": {"type": "array"}},
        "required": ["b"],
    })  # fmt: skip

    def tags(**arguments: str) -> str:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"

    def python(**arguments: str) -> str:
        return f"[f({', '.join(f'{key}={value}' for key, value in arguments.items())})]"

    for form, write, quote in ((QWEN3_CODER, tags, ""), (PYTHONIC, python, '"')):
        grammar = calls_grammar([tool], form, required=True, parallel=False)
        assert accepts(grammar, write(b="3"), tokenizer)
        assert accepts(grammar, write(a=f"{quote}x{quote}", b="3", c="[1]"), tokenizer)
        assert accepts(grammar, write(b="3", c="[]"), tokenizer)
        assert not accepts(grammar, write(a=f"{quote}x{quote}"), tokenizer)
        assert not accepts(grammar, write(a=f"{quote}z{quote}", b="3"), tokenizer)
        assert not accepts(grammar, write(b="three"), tokenizer)
        assert not accepts(grammar, write(b="3", d="4"), tokenizer)


@pytest.mark.parametrize("form", [QWEN3_CODER, GLM, FUNCTION_GEMMA], ids=["qwen3-coder", "glm", "gemma"])
def test_a_strict_schema_that_a_format_cannot_keep_to_is_refused(form):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}}
    calls_grammar([Tool("f", schema)], form, required=True, parallel=False)
    with pytest.raises(InvalidRequest, match=r"'f': its parameters .*strict is true.*properties\.a\.pattern"):
        calls_grammar([Tool("f", schema, strict=True)], form, required=True, parallel=False)


def _one_argument(form: CallFormat, value: str) -> str:
    return {
        QWEN3_CODER: f"<tool_call>\n<function=f>\n<parameter=b>\n{value}\n</parameter>\n</function>\n</tool_call>",
        GLM: f"<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        PYTHONIC: f"[f(b={value})]",
        GEMMA4: f"<|tool_call>call:f{{b:{value}}}<tool_call|>",
    }[form]


N = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
OBJECT = ('{"n": 1}', '{"n": "x"}')
PUT_TOGETHER: list[tuple[dict[str, Any], tuple[str, str], tuple[CallFormat, ...]]] = [
    ({"b": OPTIONAL}, ("null", "x"), (QWEN3_CODER, GLM, PYTHONIC, GEMMA4)),
    ({"b": {"type": ["integer", "null"]}}, ("3", "x"), (QWEN3_CODER, GLM, PYTHONIC, GEMMA4)),
    ({"b": {"$ref": "#/$defs/size"}}, ("1", "3"), (QWEN3_CODER, GLM)),
    ({"b": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]}}, ("null", "3"), (QWEN3_CODER, GLM)),
    ({"b": {"$ref": "#/$defs/n"}}, OBJECT, (QWEN3_CODER, GLM, PYTHONIC)),
    ({"b": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, OBJECT, (QWEN3_CODER, GLM, PYTHONIC)),
    ({"b": {"$ref": "#/properties/a"}, "a": N}, OBJECT, (QWEN3_CODER, GLM, PYTHONIC)),
    ({"b": {"type": "array", "items": {"$ref": "#/properties/a"}}, "a": N}, ("[]", '["x"]'), (QWEN3_CODER, PYTHONIC)),
]


@pytest.mark.parametrize(("properties", "values", "forms"), PUT_TOGETHER)
def test_arguments_that_come_one_by_one_may_be_unions_and_references(properties, values, forms, tokenizer):
    definitions = {"n": N, "size": {"enum": ["1", "2"], "type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["b"], "$defs": definitions}
    for form in forms:
        for strict in (True, False):
            grammar = calls_grammar([Tool("f", schema, strict=strict)], form, required=True, parallel=False)
            assert [accepts(grammar, _one_argument(form, one), tokenizer) for one in values] == [True, False], form


@pytest.mark.parametrize("form", [QWEN3_CODER, GLM, GEMMA4])
def test_strict_arguments_may_be_strings_or_nothing(form, tokenizer):
    schema = {"type": "object", "properties": {"b": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    grammar = calls_grammar([Tool("f", schema, strict=True)], form, required=True, parallel=False)
    for value, wanted in (("null", None), ('<|"|>so<|"|>' if form is GEMMA4 else "so", "so")):
        answer = _one_argument(form, value)
        assert accepts(grammar, answer, tokenizer)
        parser = CallParser(form, {"f": schema})
        _, [(_, arguments)] = read(parser.push(answer) + parser.flush())
        assert json.loads(arguments) == {"b": wanted}


def test_the_definitions_of_a_schema_are_not_copied_for_every_argument():
    definitions = {f"d{i}": {"type": "string", "description": "x" * 80} for i in range(500)}
    plain = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}, "$defs": definitions}
    grammar = calls_grammar([Tool("f", plain)], QWEN3_CODER, required=True, parallel=False)
    assert len(grammar.text) < 2**18
    referring = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/d1"}} for i in range(500)}
    with pytest.raises(InvalidRequest, match="with all that they refer to"):
        calls_grammar([Tool("f", plain | {"properties": referring})], QWEN3_CODER, required=True, parallel=False)


@pytest.mark.parametrize("required", [True, False])
def test_marks_that_are_special_tokens_are_those_tokens(required):
    backend = vocabularies.byte_level_original("gpt-2")
    tokenizer = Tokenizer(type(backend).from_str(backend.to_str()), {"eos_token": "<|im_end|>"})
    mark = "<|im_start|>"
    form = MISTRAL.__class__((mark,), f"{mark}[", "]", ", ")
    rules = CallRules(TOOLS, form, required=required, parallel=True)
    grammar = AnswerRules(rules).grammar(mark_tokens(tokenizer, form.marks))
    assert accepts(grammar, written(form, [("now", {}), ("now", {})]), tokenizer)
    assert accepts(grammar, "Hello.", tokenizer) is not required
    assert not accepts(grammar, mark, tokenizer)


def test_schemas_may_refer_to_their_own_definitions(tokenizer):
    linked = {"$defs": {"c": CITY}, "type": "object", "properties": {"at": {"$ref": "#/$defs/c"}}, "required": ["at"]}
    for plain in (None, ANSWER):
        rules = CallRules([*TOOLS, Tool("go", linked)], LLAMA3, required=True, parallel=False)
        grammar = AnswerRules(rules, plain).grammar({})
        assert accepts(grammar, written(LLAMA3, [("go", {"at": {"city": "Rome"}})]), tokenizer)
        assert not accepts(grammar, written(LLAMA3, [("go", {"at": {"city": 1}})]), tokenizer)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_with_a_format_an_answer_is_a_call_or_follows_it(form, tokenizer):
    for plain, answer in ((ANSWER, '{"a": 12}'), (regex("x+/y"), "xx/y")):
        grammar = AnswerRules(CallRules(TOOLS, form, required=False, parallel=True), plain).grammar({})
        call = written(form, [("weather", {"city": "Rome"})])
        assert accepts(grammar, answer, tokenizer)
        assert accepts(grammar, call, tokenizer)
        assert not accepts(grammar, "Hello.", tokenizer)
        assert not accepts(grammar, answer + call, tokenizer)
        assert not accepts(grammar, written(form, [("weather", {"city": 1})]), tokenizer)
        for text in (answer, call):
            parser = CallParser(form, {tool.name: tool.parameters for tool in TOOLS})
            found, calls = read(parser.push(text) + parser.flush())
            assert (found, len(calls)) == ((answer, 0) if text is answer else ("", 1))


PLAINS = {
    "schema": (ANSWER, '{"a": 12}'),
    "regex": (regex("x+/y"), "xx/y"),
    "lark": (Grammar(ANSWER.kind.LARK, 'start: "{" x "}"\nx: /[0-9]+/ "/"'), "{12/}"),
}


@pytest.mark.parametrize("plain", PLAINS)
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_grammars_begin_after_the_thinking(plain, has_tokens, opened):
    tokenizer = vocabulary("</think>") if has_tokens else vocabulary()  # it has the first mark in any case
    grammar, answer = PLAINS[plain]
    rules = AnswerRules(plain=grammar, thinking=THINK, is_opened=opened)
    both = rules.grammar(mark_tokens(tokenizer, THINK.marks))
    begin = "" if opened else "<think>"
    assert accepts(both, f"{begin}\nlet me {{see}}\n</think>\n\n{answer}", tokenizer)
    assert accepts(both, f"{begin}</think>{answer}", tokenizer)
    assert accepts(both, answer, tokenizer) is not opened
    assert not accepts(both, f"{begin}\nsee\n</think>\n\nHello", tokenizer)
    assert not accepts(both, f"{begin}\nsee\n</think>", tokenizer)
    assert not accepts(both, f"{begin}\nsee", tokenizer)


def test_an_answer_after_thinking_may_stand_between_marks(tokenizer):
    marked = ThinkingFormat("<think>", "</think>", "<response>", "</response>")
    grammar = AnswerRules(plain=ANSWER, thinking=marked).grammar(mark_tokens(tokenizer, marked.marks))
    assert accepts(grammar, '<think>hm</think>\n<response>\n{"a": 1}</response>', tokenizer)
    assert accepts(grammar, '<think>hm</think>{"a": 1}', tokenizer)
    assert accepts(grammar, '{"a": 1}', tokenizer)
    assert not accepts(grammar, '<think>hm</think><response>{"a": 1}', tokenizer)


@pytest.mark.parametrize("form", [HERMES, QWEN3_CODER], ids=["hermes", "qwen3-coder"])
def test_calls_come_after_the_thinking(form):
    tokenizer = vocabulary("</think>", *form.marks)
    rules = AnswerRules(CallRules(TOOLS, form, required=False, parallel=True), None, THINK)
    grammar = rules.grammar(mark_tokens(tokenizer, (*THINK.marks, *form.marks)))
    call = (
        written(HERMES, [("now", {})]) if form is HERMES else "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    )
    answer = f"<think>hm\n</think>\n\nI look.\n{call}"
    assert accepts(grammar, answer, tokenizer)
    assert accepts(grammar, f"<think>hm</think>{call}", tokenizer)
    assert accepts(grammar, "<think>hm</think>Hello.", tokenizer)
    assert accepts(grammar, "Hello.", tokenizer)
    assert not accepts(grammar, f"<think>hm</think>{call.replace('now', 'other')}", tokenizer)
    parser = AnswerParser(AnswerForm(THINK, form, tools={"now": {}}))
    thought, *rest = parser.push(answer) + parser.flush()
    assert (thought, read(rest)) == (Reasoning("hm"), ("I look.\n", [("now", "{}")]))


def allowed(mask: bytes) -> set[int]:
    number = int.from_bytes(mask, "little")
    return {token for token in range(8 * len(mask)) if number >> token & 1}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize(("opened", "limit"), [(True, 0), (True, 3), (False, 0), (False, 5)])
def test_a_thinking_budget_is_kept_to_the_token(has_tokens, opened, limit):
    tokenizer = vocabulary("</think>") if has_tokens else vocabulary()
    rules = AnswerRules(plain=ANSWER, thinking=THINK, is_opened=opened)
    grammar = replace(
        rules.grammar(mark_tokens(tokenizer, THINK.marks)),
        thinking_budget=ThinkingBudget("<think>", "</think>", opened, limit),
    )
    walk = Walk(Grammars(lambda: tokenizer, [named_id(tokenizer, "eos_token")], tokenizer.vocab_size).matcher(grammar))
    (letter,) = tokenizer.encode("z", add_special_tokens=False)
    begin = [] if opened else tokenizer.encode("<think>", add_special_tokens=False)
    mask = walk.after(begin)
    for _ in range(limit):
        assert letter in allowed(mask)
        mask = walk.after([letter])
    for token in tokenizer.encode("</think>", add_special_tokens=False):
        assert allowed(mask) == {token}
        mask = walk.after([token])
    for token in tokenizer.encode('\n{"a": 1}', add_special_tokens=False):
        assert token in allowed(mask)
        assert letter not in allowed(mask)
        mask = walk.after([token])


def test_a_character_is_completed_before_a_budget_ends_the_thinking():
    tokenizer = vocabulary("</think>")
    rules = AnswerRules(plain=ANSWER, thinking=THINK, is_opened=True)
    grammar = replace(
        rules.grammar(mark_tokens(tokenizer, THINK.marks)),
        thinking_budget=ThinkingBudget("<think>", "</think>", True, 1),
    )
    walk = Walk(Grammars(lambda: tokenizer, [named_id(tokenizer, "eos_token")], tokenizer.vocab_size).matcher(grammar))
    first, *rest = next(ids for char in "çßŷжΩ汉" if len(ids := tokenizer.encode(char, add_special_tokens=False)) > 1)
    end = tokenizer.encode("</think>", add_special_tokens=False)[0]
    mask = walk.after([first])
    for token in rest:
        assert end not in allowed(mask)
        assert token in allowed(mask)
        mask = walk.after([token])
    assert allowed(mask) == {end}
