"""Grammars that clients write, in GBNF and in Lark."""

import json
import time
from contextlib import suppress

import llguidance
import pytest

from quire.errors import InvalidRequest
from quire.grammar.gbnf import is_gbnf
from quire.grammar.lark_text import client_grammar, embedded
from quire.grammar.matcher import compile_grammar, fault_in
from quire.request import Grammar, GrammarKind, choice, json_schema, regex

BYTES = llguidance.LLTokenizer("byte")
JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Blanks
ws ::= | " " | "\n" [ \t]{0,20}
"""


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = compile_grammar(grammar, BYTES)
    assert fault_in(matcher) is None, fault_in(matcher)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON_GBNF, ['{"name": "é \\u00e9", "list": [1, -2.5e1, true]}', "{}\n\t"], ['{"a"}', "[1]", '{"a": 01}']),
        # What a rule could take and a later one needs: every text of the grammar can be written.
        ('root ::= word "z"\nword ::= [a-z]*', ["z", "aazz"], ["a", ""]),
        ('root ::= "ab" "c" | [a-z] [a-z] "d"', ["abc", "abd", "xyd"], ["abz"]),
        ('root ::= (a | )\n  | "\\x41" [^a-c\\]-]{2,3} .?\na ::= "a"', ["a", "", "A12", "A12x\n"], ["A-1", "Aab"]),
        ('root ::= "é" [à-ü]+ "\\u00e9\\U0001F600"', ["éàé😀"], ["éé😀"]),
        ('root ::= x-y{2,} X_1?\nx-y ::= "/"\nX_1 ::= "\\"\\\\\\n"', ['//"\\\n', "///"], ["/"]),
    ],
)
def test_gbnf_means_what_it_means_elsewhere(grammar: str, right: list[str], wrong: list[str]) -> None:
    given = client_grammar("it", grammar)
    assert given.kind is GrammarKind.LARK
    for text in right:
        assert accepts(given, text), text
    for text in wrong:
        assert not accepts(given, text), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("root ::= x", True),
        ("# rules\n \troot-1_b\n\n ::= x", True),
        ('start: "a ::= b"\nb ::= c', True),
        ('start: "a ::= b"', False),
        ("::= a", False),
        ("a ::=::=\n::=", True),
        ("a b ::= c ::=\n::=", False),
        ("start: /x/", False),
        ("", False),
    ],
)
def test_gbnf_is_told_by_the_beginning_of_a_rule(text: str, expected: bool) -> None:
    assert is_gbnf(text) is expected


@pytest.mark.parametrize(
    ("text", "what"), [('start: "' + '\\"' * 30_000, "a string"), ("start: /" + "\\/" * 30_000, "an expression")]
)
def test_rules_with_an_end_that_is_missing_are_read_once(text: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=f"has {what} that is not closed"):
        client_grammar("grammar", text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= (", "leaves brackets open"),
        ("root ::= )", "closes what is not open"),
        ('a ::= "x"', "no rule that is called root"),
        ("root ::= x", "'x', which is not there"),
        ("root ::= *", "repeats nothing"),
        ('root ::= "a"\nroot ::= "b"', "line 2.* again"),
        ("root ::= (a ::= b)", "inside of brackets"),
        ("root ::= [b-a]", "ends before it begins"),
        ("root ::= []", "an empty set"),
        ('root ::= "\\q"', "escape"),
        ("root ::= [", "cannot be read"),
        ('root ::= "x"{5000}', "at most 1000 times"),
        ('root ::= "x"{1,' + " " * 60_000, "cannot be read"),
        ('root ::= "\\ud800"', "0xd800"),
        ('"x"\nroot ::= "x"', "before the first rule"),
    ],
)
def test_gbnf_that_is_wrong_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        client_grammar("grammar", text)
    assert refused.value.param == "grammar"


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 60_000,
        'root ::= "' + "x" * 60_000 + '"',
        "root ::= [" * 6_000,
        "root ::= " + '"' * 60_001,
        "a::=b\n" * 10_000,
        "\n".join(f"r{n} ::= r{n + 1}" for n in range(4000)),
        "start: " + "/a/ " * 16_000,
        "start: " + '"' * 60_000,
        "start: " + "/" * 60_000,
        "start: " + '%json {"a":' * 5_000,
        "start: " + "\\" * 60_000,
        '{"grammars":' * 5_000,
        "start: " + "a" * 60_000,
        "a" * 60_000,
        "a " * 30_000,
        "a\n" * 30_000,
        "start: " + " " * 60_000 + "a",
        "start: " + "\n" * 60_000,
        "start: " + "<a" * 30_000,
        "start: " + "temperature " * 5_000,
        "root ::= " + "a" * 60_000,
        "root ::= " + "a " * 30_000,
        "root ::= a" + " " * 60_000,
    ],
)
def test_a_hostile_text_is_read_in_linear_time(text: str) -> None:
    begun = time.thread_time()
    with suppress(InvalidRequest):
        client_grammar("it", text)
    assert time.thread_time() - begun < 2  # milliseconds; only what is quadratic takes as long


def test_schemas_within_rules_are_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = client_grammar("it", f'start: "x" %json {json.dumps(schema)} // %json {{\n')
    assert accepts(given, 'x{"a": 1}')
    assert not accepts(given, 'x{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (json_schema({"type": "object", "properties": {"a": {"const": 1}}}), '{"a": 1}', '{"b": 1}'),
        (regex(r"a/[b\/\n]+\d"), "a/b/\n7", "a/b"),
        (regex("a\\\nb"), "a\nb", "a\\nb"),
        (client_grammar("it", 'root ::= "a" b\nb ::= "b"'), "ab", "b"),
        (choice(["a.b", "a", "/"]), "a.b", "axb"),
    ],
)
def test_any_grammar_can_be_part_of_another(grammar: Grammar, right: str, wrong: str) -> None:
    whole = Grammar(GrammarKind.LARK, f'start: "<" part ">"\n{embedded("part", grammar)}')
    assert accepts(grammar, right)
    assert accepts(whole, f"<{right}>")
    assert not accepts(whole, f"<{wrong}>")


def test_every_character_of_a_choice_stands_for_itself() -> None:
    texts = ["a.b", "[x]", "\\d", "é|😀", "^$", "{2}", " - ", "(", "\n"]
    for text in texts:
        assert accepts(choice(texts), text)
    assert not accepts(choice(texts), "axb")
