"""JSON schemas as answers follow them: closed unless they say otherwise, and nothing that they say is lost."""

import contextlib
import enum
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
import llguidance
import pytest
from hypothesis import given
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from quire.errors import InvalidRequest
from quire.grammar.answers import AnswerRules, CallRules
from quire.grammar.closed_schema import guided_schema
from quire.grammar.limits import refuse_what_explodes
from quire.grammar.matcher import compile_grammar, fault_in
from quire.request import GrammarKind, json_schema
from quire.text.tools import HERMES, Tool
from tests.text.grammar_fuzzing import objects

BYTES = llguidance.LLTokenizer("byte")
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


def matcher_of(schema: Any) -> llguidance.LLMatcher:
    matcher = compile_grammar(json_schema(schema), BYTES)
    assert fault_in(matcher) is None, fault_in(matcher)
    return matcher


class Text(str):
    """JSON as it is written."""


def accepts(schema: Any, answer: Any) -> bool:
    """Whether `answer` is a whole answer."""
    text = answer if isinstance(answer, Text) else json.dumps(answer)
    matcher = matcher_of(schema)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("an object has its properties alone, in order",
     {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["b"]},
     [{"b": 1}, {"a": 1, "b": 2}],
     [{}, {"b": 1, "a": 1}, {"b": 1, "c": 2}, {"a": 1}, Text('{"b": 1, "b": 2}'), Text('{"a": 1, "a": 1, "b": 2}')]),
    ("an object without properties is open", {"type": "object"}, [{}, {"x": [1, {"y": 2}]}], [[], 3]),
    ("a schema that says so is open",
     A | {"additionalProperties": True}, [{"a": 1}, {"a": 1, "x": "y"}], [{"x": "y"}]),
    ("a schema may say what others hold",
     A | {"additionalProperties": {"type": "boolean"}}, [{"a": 1, "x": True}], [{"a": 1, "x": 3}]),
    ("a pattern says what others are called",
     A | {"patternProperties": {"^x": {"type": "boolean"}}}, [{"a": 1, "xy": True}], [{"a": 1, "y": True}]),
    ("no properties are none", {"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    ("what is nested is closed too",
     {"type": "array", "items": {"anyOf": [A, {"type": "null"}]}}, [[{"a": 1}, None]], [[{"a": 1, "b": 1}]]),
    ("what is required is possible",
     {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "z"]},
     [{"a": 1, "z": [2]}], [{"a": 1}, {"a": 1, "z": 1, "y": 1}]),
    ("references are closed",
     {"type": "object", "properties": {"x": {"$ref": "#/$defs/A", "description": "one"}}, "$defs": {"A": A}},
     [{}, {"x": {"a": 1}}], [{"x": {"a": 1, "b": 2}}]),
    ("recursion is closed",
     {"$ref": "#/$defs/N",
      "$defs": {"N": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}}},
     [{}, {"next": {"next": None}}], [{"next": {"other": 1}}]),
    ("schemas of allOf are closed together",
     {"allOf": [A, B, {"required": ["a"]}]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}]),
    ("references in allOf are closed together, and apart elsewhere",
     {"properties": {"alone": {"$ref": "#/$defs/A"}}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
      "$defs": {"A": A, "B": B}},
     [{"alone": {"a": 1}, "a": 1, "b": 2}, {"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}, {"a": 1},
      {"alone": {"a": 1, "b": 2}, "a": 1, "b": 2}]),
    ("one of allOf may open them all",
     {"allOf": [A, B | {"additionalProperties": True}]}, [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "c": 3}]),
    ("properties beside a choice are open to its keys, each to its own",
     {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"], "anyOf": [A, B]},
     [{"k": 1, "a": 2}, {"k": 1, "b": 2}], [{"k": 1}, {"k": 1, "a": 2, "b": 3}, {"k": 1, "a": 1, "c": 1}]),
    ("a reference beside properties is closed with them",
     {"$ref": "#/$defs/A", "properties": {"k": {"type": "integer"}}, "$defs": {"A": A}},
     [{"a": 1, "k": 2}], [{"a": 1, "x": 1}]),
    ("what has been evaluated nowhere is no part of it",
     {"allOf": [A, B], "unevaluatedProperties": False}, [{"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    ("only what a reference without properties evaluates",
     {"$ref": "#/$defs/O", "unevaluatedProperties": False, "$defs": {"O": {"type": "object"}}}, [{}], [{"a": 1}]),
    ("oneOf by a constant",
     {"oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}], "discriminator": {"propertyName": "kind"}, "$defs": {
         "C": {"type": "object", "properties": {"kind": {"const": "c"}, "x": {"const": 1}}, "required": ["kind"]},
         "D": {"type": "object", "properties": {"kind": {"const": "d"}, "x": {"const": 1}}}}},
     [{"kind": "c", "x": 1}, {"kind": "d"}], [{"kind": "e"}, {"x": 1}]),
    ("oneOf by what is required", {"oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
    ("oneOf by type", {"oneOf": [{"type": "integer"}, {"type": "string"}, {"enum": [None]}]}, [1, "x", None], [[]]),
    ("sets of known values",
     {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
     [["x"], ["x", "z"]], [[], ["x", "x"], ["x", "y", "z"]]),
    ("uniqueItems where it says nothing",
     {"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"type": "integer"}}, [[], [1]], [[1, 2]]),
    ("uniqueItems that is false",
     {"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, [[1, 1]], [["x"]]),
    ("sets have each value once, and may be null",
     {"type": ["array", "null"], "uniqueItems": True, "items": {"enum": ["x", "y", "x", 1, 1.0]}},
     [None, [], ["x", "y", 1]], [["x", "x"], [1, 1], ["y", "y"]]),
    ("sets among given ones",
     {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "enum": [[1, 2], [1, 1], 3]},
     [[1, 2]], [[], [1], [1, 1], 3]),
    ("sets of what both a constant and a list allow",
     {"type": "array", "uniqueItems": True, "items": {"const": 1, "enum": [2, 1]}}, [[], [1]], [[2], [1, 1]]),
    ("oneOf beside other keys",
     {"type": "object", "properties": {"c": {"type": "integer"}}, "oneOf": [A, B]},
     [{"c": 1, "a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"c": 1}]),
    ("names that are listed",
     {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
     [{}, {"x": 1, "y": 2}], [{"z": 1}, {"x": "s"}]),
    ("names that match",
     {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": {"type": "integer"}},
     [{}, {"ab": 1}], [{"c": 1}, {"a": "s"}]),
    ("unknown formats are annotations", {"type": "string", "format": "json-string"}, ["{}"], [1]),
    ("known formats are kept", {"type": "string", "format": "date"}, ["2024-05-06"], ["May 6th"]),
    ("a choice goes on without a pattern that looks ahead",
     {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!x)[0-9]+$"}]}, [1.5], ["x"]),
    ("a choice has a pattern with brackets that are escaped",
     {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^\(?=1\\?$"}]}, [1.5, "(=1", "=1"], ["x", "1"]),
    ("blanks are few", A,
     [Text('{\n  "a": 1\n}'), Text('{"a":1}')], [Text('{ \n "a": 1}'), Text('{"a":' + " " * 17 + "1}")]),
    ("properties at the top are an object's", {"properties": A["properties"], "required": ["a"]},
     [{"a": 1}], [{}, "a", 3, []]),
    ("large numbers are kept where they are floats", {"enum": [2**60, -(2**53) - 2]},
     [2**60, -(2**53) - 2], [2**60 + 1]),
    ("large bounds become floats within them", {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**63 - 1},
     [2**53 + 2, 2**62, 2**63 - 1024], [2**53, 2**63, 2**64]),
    ("whole numbers that are excluded, close to the other bound",
     {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, [0.1, 0.499, 0.0001], [0, Text("0.0"), 0.5]),
    ("the same below", {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, [-1.2, -1.0001], [-1, -1.6, 0]),
    ("bounds beyond 64 bits that keep nothing out", {"type": "integer", "minimum": -(2**63), "maximum": 2**70},
     [0, -(2**62)], [2**64]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_answers_are_those_of_the_closed_schema(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    for answer in right:
        assert accepts(schema, answer), answer
        assert jsonschema_rs.is_valid(schema, json.loads(answer) if isinstance(answer, Text) else answer)
    for answer in wrong:
        assert not accepts(schema, answer), answer


def test_style_may_be_given_and_nothing_else_of_it() -> None:
    schema = A | {"x-guidance": {"whitespace_pattern": "", "lenient": True, "coerce_one_of": True}}
    assert accepts(schema, Text('{"a":1}'))
    assert not accepts(schema, Text('{"a": 1}'))
    assert fault_in(compile_grammar(json_schema(schema | {"not": {}}), BYTES)) is not None
    with pytest.raises(InvalidRequest, match=r"x-guidance\.whitespace_pattern"):
        refuse_what_explodes("it", json_schema({"x-guidance": {"whitespace_pattern": "(a{1000}){1000}"}}))


REFUSED = [
    ({"type": "object", "properties": {"t": {"type": "array", "uniqueItems": True, "items": {"type": "string"}}}},
     r"properties\.t\.uniqueItems is True"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": list(range(9))}}, "uniqueItems"),
    ({"uniqueItems": True, "items": {"enum": [1]}}, "uniqueItems"),
    ({"type": ["array", "null"], "uniqueItems": True, "items": {"type": "string"}}, "uniqueItems"),
    ({"type": ["array", "string"], "uniqueItems": True, "items": {"enum": [1]}}, "uniqueItems"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2], "exclusiveMinimum": 1}}, "uniqueItems"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [[1], [2]], "contains": {"const": 1}}}, "uniqueItems"),
    ({"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/n", "minimum": 2},
      "$defs": {"n": {"enum": [1]}}},
     "uniqueItems"),
    ({"oneOf": [{"const": [1]}, {"const": [1.0]}]}, "oneOf"),
    ({"type": "object", "properties": A["properties"] | B["properties"], "oneOf": [A, B]}, "oneOf"),
    ({"allOf": [{"required": ["a", "b"]}, {"oneOf": [A, B]}]}, "oneOf"),
    ({"oneOf": [{"$ref": "#/$defs/a", "additionalProperties": True},
                {"$ref": "#/$defs/b", "additionalProperties": True}],
      "$defs": {"a": A, "b": B}}, "oneOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, r"oneOf\[0\] and \[1\] may both fit"),
    ({"oneOf": [A, A | {"required": []}]}, "oneOf"),
    ({"oneOf": [A | {"additionalProperties": True}, B]}, "oneOf"),
    ({"anyOf": [A, B], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"allOf": [{"anyOf": [A, B]}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "unevaluatedProperties": {"type": "string"}}, "unevaluatedProperties"),
    ({"type": "object", "propertyNames": {"minLength": 3}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"type": "integer"}}, "propertyNames"),
    ({"type": "object", "not": {"required": ["x"]}}, "not"),
    ({"type": "object", "if": {}, "then": {}}, "if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "string", "pattern": "^(?!x)"}, "look-around"),
    ({"type": "object", "properties": {"id": {"enum": [1, 2**60 + 1]}}},
     r"properties\.id\.enum has the number 1152921504606846977"),
    ({"const": {"a": [2**53 + 1]}}, "const has the number 9007199254740993"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [2**53 + 1]}}, "enum has the number 9007199254740993"),
    ({"const": 10**400}, "const has the number 1000000"),
    ({"type": "integer", "exclusiveMinimum": 2**63}, "exclusiveMinimum has the number 9223372036854775808"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "maximum"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "why"), REFUSED)
def test_what_would_be_lost_is_refused_by_its_name(schema: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        raise InvalidRequest(fault_in(compile_grammar(json_schema(schema), BYTES)) or "nothing is wrong")


WRONG: list[Any] = [
    {"format": []},
    {"type": "object", "required": 5, "discriminator": {"propertyName": "a"}},
    {"type": "object", "propertyNames": {"pattern": {}}},
    {"$defs": 5, "properties": {"a": {}}, "allOf": [{"$ref": "#/properties/a"}]},
    {"allOf": 5, "oneOf": [{"type": "string"}], "anyOf": [{}]},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2], "type": 5}},
]


@pytest.mark.parametrize("schema", WRONG)
def test_values_that_no_keyword_has_are_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        raise InvalidRequest(fault_in(compile_grammar(json_schema(schema), BYTES)) or "nothing is wrong")
    with contextlib.suppress(InvalidRequest):
        guided_schema(schema, strict=False)


@given(objects)
def test_every_schema_is_rewritten_or_refused(schema: dict[str, Any]) -> None:
    for strict in (True, False):
        with contextlib.suppress(InvalidRequest):
            guided_schema(schema, strict)


def test_schemas_that_refer_to_each_other_forever_take_a_bounded_time() -> None:
    chain = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"properties": {f"k{n}": {}}}]} for n in range(3000)}
    rings = {f"d{n}": {"allOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]} for n in range(2)}
    wide = [{"properties": {f"k{n}-{m}": {} for m in range(60)}} for n in range(300)]
    for schema in (
        {"$ref": "#/$defs/d0", "$defs": chain},
        {"allOf": wide},
        {"oneOf": [{"const": n} for n in range(2000)]},
    ):
        with pytest.raises(InvalidRequest, match="too complex"):
            guided_schema(schema)
    guided_schema({"$ref": "#/$defs/d0", "properties": {"a": {}}, "$defs": rings})
    guided_schema({"$ref": "#", "properties": {"a": {}}})
    for odd in ({"properties": 3}, {"allOf": 3, "anyOf": {}, "oneOf": "x"}, {"$ref": 3}, {"required": {}}, {"enum": 1},
                {"allOf": [3, None]}, {"items": 3, "uniqueItems": "x", "type": "integer"}, True):  # fmt: skip
        guided_schema(odd)


# As Pydantic writes schemas


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool = True


class Node(BaseModel):
    name: str = Field(max_length=3)
    children: list["Node"] = Field(default=[], max_length=1)


class Everything(BaseModel):
    """What its fields become is most of what Pydantic writes."""

    name: str = Field(max_length=4, description="short")
    nick: str | None = Field(default=None, max_length=2)
    age: Annotated[int, Field(gt=0, lt=120)]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    colors: set[Color]
    counts: dict[Color, int]
    flags: dict[Literal["x", "y"], bool]
    tree: Node
    pair: tuple[bool, Color]
    where: Path
    price: Decimal
    secret: SecretStr = Field(max_length=2)


def walk(schema: Any, seed: int) -> str:
    """An answer that is random but for the grammar, and mostly ends what it can end."""
    chance, matcher, text = random.Random(seed), matcher_of(schema), bytearray()
    while len(text) < 3000:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        choice = [token for token in range(256) if mask >> token & 1]
        if matcher.is_stopped() or not choice or (matcher.is_accepting() and chance.random() < 0.5):
            return text.decode()
        ends = [token for token in choice if token in b'"}],' or chr(token).isalnum()]
        if text[-1:].isdigit():  # numbers stay small
            ends = [token for token in ends if token not in b"eE0123456789"]
        token = chance.choice(ends or choice)
        matcher.consume_token(token)
        text.append(token)
    raise AssertionError(f"the answer does not end: {text!r}")


def strict(document: Any) -> Any:
    """Every object with properties refuses others: what the answers are held to."""
    if isinstance(document, dict):
        closed = {key: strict(value) for key, value in document.items()}
        if "properties" in closed and "additionalProperties" not in closed:
            closed["additionalProperties"] = False
        return closed
    return [strict(one) for one in document] if isinstance(document, list) else document


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key comes twice"
    return dict(pairs)


@pytest.mark.parametrize("model", [Everything, Node, Cat, Dog])
def test_answers_to_schemas_of_pydantic_validate_and_have_no_other_keys(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    for seed in range(6):
        text = walk(schema, seed)
        model.model_validate_json(text)
        document = json.loads(text, object_pairs_hook=without_doubles)
        assert jsonschema_rs.is_valid(strict(schema), document), text


def test_a_model_that_allows_extras_gets_them() -> None:
    class Loose(BaseModel):
        model_config = ConfigDict(extra="allow")
        a: int

    assert accepts(Loose.model_json_schema(), {"a": 1, "more": 2})


def fits(arguments: Any, parameters: Any, *, strict: bool = False) -> bool:
    """Whether `arguments` are those of a call."""
    calls = CallRules([Tool("f", parameters, strict=strict)], HERMES, required=True, parallel=False)
    grammar = AnswerRules(calls).grammar({})
    assert grammar.kind is GrammarKind.LARK
    matcher = compile_grammar(grammar, BYTES)
    assert fault_in(matcher) is None, fault_in(matcher)
    call = json.dumps({"name": "f", "arguments": arguments})
    text = f"<tool_call>\n{call}\n</tool_call>"
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def test_the_parameters_of_tools_are_closed_too() -> None:
    for strict in (False, True):
        assert fits({"a": 1}, A, strict=strict)
        assert not fits({"a": 1, "b": 1}, A, strict=strict)
        assert fits({"a": 1}, {"properties": {"a": {}}}, strict=strict)
        assert not fits("text", {"properties": {"a": {}}}, strict=strict)


KEPT_ONLY_IF_STRICT = [
    {"uniqueItems": True, "type": "array", "items": {"type": "string"}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}, {"type": "array"}]},
    {"type": "array", "not": {"const": []}},
    {"type": "array", "if": {"minItems": 1}, "then": {"maxItems": 2}},
    {"anyOf": [{"type": "array"}, {"type": "string"}], "unevaluatedProperties": False},
    {"type": ["array", "string"], "pattern": "^(?!x)"},
    {"anyOf": [{"type": "array"}, {"type": "integer", "const": 2**60 + 1}]},
]


@pytest.mark.parametrize("schema", KEPT_ONLY_IF_STRICT)
def test_a_tool_that_need_not_be_strict_has_the_rest_of_its_schema(schema: Any) -> None:
    """As clients send tools of others: what cannot be kept is lost, and no more."""
    parameters = {"type": "object", "properties": {"s": schema, "n": {"type": "integer"}}, "required": ["s", "n"]}
    assert fits({"s": ["x", "x"], "n": 1}, parameters)
    assert not fits({"s": ["x", "x"], "n": "1"}, parameters)
    assert not fits({"s": ["x", "x"], "n": 1, "o": 2}, parameters)
    with pytest.raises((InvalidRequest, AssertionError)):
        fits({"s": ["x", "x"], "n": 1}, parameters, strict=True)
