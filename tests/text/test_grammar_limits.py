"""Limits of grammars: linear in the grammar's size, exact about repetitions, and typed errors for all that is wrong."""

import json
import re
import time
from contextlib import suppress

import llguidance
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.errors import InvalidRequest
from quire.grammar.checker import fault_of as checker_fault
from quire.grammar.limits import MAX_BYTES, refuse_schema_that_explodes, refuse_what_explodes
from quire.grammar.matcher import NO_ANSWER, compile_grammar, fault_in
from quire.grammar.regex_size import expanded
from quire.request import Grammar, GrammarKind, json_schema, regex

MAX_CPU_S = 2.0  # for 256 KiB, on any machine; what is quadratic takes 40 s
BYTES = llguidance.LLTokenizer("byte")


def filled(piece: str) -> str:
    return piece * (MAX_BYTES // len(piece.encode()))


@pytest.mark.parametrize(
    "piece",
    ["\\p{", "\\x{1", "{", "{1", "{1,", "{ ", "[", "[^", "[a-", "(", "(?", "(?i", "(?:", "\\", "\\\\", "[[:", "[&&",
    "a{2}",
     "{#", "(a){9}", "{,", "é"],
)  # fmt: skip
def test_the_check_of_a_regular_expression_takes_linear_time(piece: str) -> None:
    for grammar in (regex(filled(piece)), json_schema({"pattern": filled(piece)[: MAX_BYTES // 2 - 50]})):
        begun_s = time.thread_time()
        with suppress(InvalidRequest):
            refuse_what_explodes("response_format", grammar)
        assert time.thread_time() - begun_s < MAX_CPU_S


@pytest.mark.parametrize("begun", ["a{", "a{1", "a{1,", "a{1,1", "a{ 1 ,", "[", "[^", "[a-", "\\p{", "(?", "(?i"])
def test_a_long_run_after_what_begins_something_takes_linear_time(begun: str) -> None:
    for run in " \t1,-^[ai":
        begun_s = time.thread_time()
        with suppress(ValueError):
            expanded(begun + run * 65_536 + "x")
        assert time.thread_time() - begun_s < MAX_CPU_S, run


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 50_000, "[" * 250_000, '{"enum":[' + "1," * 120_000 + "1]}", '{"' + "k" * 250_000 + '":[]}',
        '{"' + "k" * 4000 + '":[' + "[]," * 80_000 + "[]]}",
    ],
)  # fmt: skip
def test_the_check_of_a_schema_takes_linear_time(text: str) -> None:
    begun_s = time.thread_time()
    with suppress(InvalidRequest):
        refuse_what_explodes("response_format", Grammar(GrammarKind.JSON_SCHEMA, text))
    assert time.thread_time() - begun_s < MAX_CPU_S


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a{" + "9" * 5000 + "}", "1000000000 or more characters"),
        ("a{1," + "9" * 5000 + "}", "1000000000 or more characters"),
        ("a" + "{999}" * 2000, "1000000000 or more characters"),
        ("a{" + "0" * 4000 + "}b{2}{3}", None),
        ("((a{1000}){0,}){1000}", "1000000 characters"),
        ("[!-[](a{1000}){1000}", "1000001 characters"),
        ("[]a](a{1000}){1000}", "1000001 characters"),
        ("[^]](b{1000}){1000}", "1000001 characters"),
        ("(?x)# [\n(a{1000}){1000}", "the flag x"),
        ("(?i-sx:a)", None),
        ("[[:alpha:]&&[^{}]]{3}", None),
    ],
)
def test_repetitions_are_counted_wherever_they_stand(pattern: str, why: str | None) -> None:
    for grammar in (regex(pattern), json_schema({"items": {"pattern": pattern}})):
        if why is None:
            refuse_what_explodes("grammar", grammar)
            continue
        with pytest.raises(InvalidRequest, match=why):
            refuse_what_explodes("grammar", grammar)


CLASSES = ["a", "\\{", "\\\\", "é", ".", "\\d", "[ab]", "[{]", "[{9}]", "[]]", "[^]{]", "[!-[]", "[-[a]]", "[a--b]",
    "[a&&[ab]]",
           "\\x{41}", "\\pL", "\\p{Lu}", "[\\]{5}]", "[[:alpha:]{]", "[+--]", "[]-a]"]  # fmt: skip


@st.composite
def sized(draw: st.DrawFn, depth: int = 4) -> tuple[str, int]:
    """A regular expression and how many characters and classes it stands for."""
    kind = draw(st.sampled_from(["one", "group", "join", "or", "star", "times", "least"] if depth else ["one"]))
    if kind == "one":
        return draw(st.sampled_from(CLASSES)), 1
    inner, size = draw(sized(depth - 1))
    if kind in ("join", "or"):
        other, more = draw(sized(depth - 1))
        return f"{inner}{'|' if kind == 'or' else ''}{other}", size + more
    opening = draw(st.sampled_from(["(", "(?:", "(?i:", "(?P<n{}>"]))
    group = f"{opening.format(draw(st.integers(0, 10**9)))}{inner})"
    if kind == "star":
        return f"{group}{draw(st.sampled_from('*+?'))}", size
    times = draw(st.integers(0, 30))
    if kind == "least":
        return f"{group}{{{times},}}", size * max(times, 1)
    return (f"{group}{{{times}}}", size * times) if kind == "times" else (group, size)


@given(sized())
def test_no_repetition_is_counted_too_low(found: tuple[str, int]) -> None:
    pattern, size = found
    assert expanded(pattern) >= size


PIECES = ["a", "b", "{", "}", "2", ",", "(", ")", "(?", "i", "-", ":", "P<n>", "[", "]", "^", "$", "|", "*", "+", "?",
    "\\", "p",
          "x", "u", "{L}", "{41}", "&&", "--", "~~", "[:alpha:]", ".", "é", "d", "#", " ", "/", "\n"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("\\")
@example("a\\\\\\")
@example("[a\\")
def test_what_is_refused_before_compiling_cannot_be_compiled(pattern: str) -> None:
    try:
        expanded(pattern)
    except ValueError as error:
        if "backslash" in str(error) or "flag x" in str(error):
            return  # the library drops the backslash, and reads comments wrong
        fault = fault_in(compile_grammar(regex(pattern), BYTES))
        assert fault is not None


@pytest.mark.parametrize("pattern", ["\\", "a\\", "\\\\\\", "[a\\"])
def test_a_backslash_that_escapes_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="ends with a backslash"):
        refuse_what_explodes("grammar", regex(pattern))


MALFORMED = [
    "[", "(", "*", "a{2,1}", ")", "a{", "a{2", "{2}", "a{,3}", "(?=a)", "(?!a)", "(?<=a)b", "(?<!a)b", r"(a)\1",
    "(?P=n)", "a$b",
    r"\bword\b", r"\p{Nothing}", "[z-a]", "[]", "(?", "(?#c)", r"\Q", r"\u{d800}", "(?:", "a{9" + "9" * 30 + "}",
    "(?-u:\\xff)",
    "(?x)a", "\ud800",
]  # fmt: skip


def fault_of(pattern: str) -> str:
    try:
        refuse_what_explodes("grammar", regex(pattern))
    except InvalidRequest as refused:
        return refused.message
    return str(fault_in(compile_grammar(regex(pattern), BYTES)))


@pytest.mark.parametrize("pattern", MALFORMED)
def test_a_malformed_expression_is_refused_with_a_reason(pattern: str) -> None:
    assert re.match("grammar |at .*invalid regex", fault_of(pattern))


def test_a_long_grammar_is_refused_by_its_length() -> None:
    for grammar in (regex("a" * (MAX_BYTES + 1)), regex("é" * (MAX_BYTES // 2 + 1))):
        with pytest.raises(InvalidRequest, match=rf"^grammar has \d+ (characters|bytes); the limit is {MAX_BYTES}"):
            refuse_what_explodes("grammar", grammar)
    with pytest.raises(InvalidRequest, match=rf"the limit is {MAX_BYTES}"):
        refuse_schema_that_explodes("tools[0].function.parameters", {"enum": ["x" * 1000] * 300})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    for depth in (65, 1000, 3000):
        text = '{"items":' * depth + "{}" + "}" * depth
        with pytest.raises(InvalidRequest, match="grammar: nested deeper than 64 levels"):
            refuse_what_explodes("grammar", Grammar(GrammarKind.JSON_SCHEMA, text))
    refuse_what_explodes("grammar", Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 60 + "{}" + "}" * 60))


def test_a_schema_that_is_no_json_is_refused() -> None:
    endless: dict[str, object] = {}
    endless["items"] = endless
    for schema in ({"const": 10**5000}, {"const": object()}, endless):
        with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
            json_schema(schema)
    for text in ("{", json.dumps({"const": "\ud800"}), '{"minimum": NaN}', "9" * 5000):
        with pytest.raises(InvalidRequest, match="grammar: not valid JSON"):
            refuse_what_explodes("grammar", Grammar(GrammarKind.JSON_SCHEMA, text))


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}],
    ids=["itself", "each other"],
)
def test_a_schema_that_only_refers_to_itself_is_said_to_have_no_answer(schema: dict[str, object]) -> None:
    assert checker_fault(json_schema(schema), BYTES) == NO_ANSWER
