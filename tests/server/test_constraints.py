"""Constraints in every form that clients send them: followed, or refused by name."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests import web
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, served_model

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x"]}}, "required": ["a", "b"]}
GBNF = 'root ::= digits "-" digits\ndigits ::= [0-9]{2,3} # few\n'
LARK = 'start: word "-" word\nword: /[ab]{2}/\n'
ASK = [{"role": "user", "content": "tell me"}]


def is_thing(text: str) -> bool:
    thing = json.loads(text)
    return list(thing) == ["a", "b"] and thing["a"] in (1, 2) and thing["b"] == "x"


def matches(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text) is not None


FOLLOWED = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_thing),  # llama.cpp and others
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, is_thing),
    ({"response_format": {"type": "regex", "pattern": "[a-f]{3}"}}, matches("[a-f]{3}")),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, matches("[0-9]{2,3}-[0-9]{2,3}")),
    ({"json_schema": SCHEMA}, is_thing),
    ({"json_schema": json.dumps(SCHEMA)}, is_thing),  # SGLang
    ({"regex": "[a-f]{3}"}, matches("[a-f]{3}")),
    ({"grammar": GBNF}, matches("[0-9]{2,3}-[0-9]{2,3}")),  # llama.cpp
    ({"grammar": {"type": "regex", "value": "[a-f]{3}"}}, matches("[a-f]{3}")),
    ({"ebnf": 'root ::= "x" | "yes"'}, matches("x|yes")),  # SGLang
    ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, is_thing),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": ""}, matches(r'\{"a":[12],"b":"x"\}')),
    ({"guided_regex": "[a-f]{3}"}, matches("[a-f]{3}")),
    ({"guided_choice": ["yes", "no", "yes. but"]}, matches(r"yes|no|yes\. but")),
    ({"guided_grammar": GBNF}, matches("[0-9]{2,3}-[0-9]{2,3}")),
    ({"guided_grammar": LARK}, matches("[ab]{2}-[ab]{2}")),
    ({"guided_grammar": json.dumps({"grammars": [{"lark_grammar": LARK}]})}, matches("[ab]{2}-[ab]{2}")),
    ({"guided_grammar": json.dumps({"grammars": [{"json_schema": SCHEMA}]})}, is_thing),
    ({"guided_grammar": f"start: %json {json.dumps(SCHEMA)}"}, is_thing),
    # As guidance sends it: the same in the old form and in the new
    ({"guided_decoding_backend": "guidance", "guided_grammar": LARK, "structured_outputs": {"grammar": LARK}},
     matches("[ab]{2}-[ab]{2}")),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}, is_thing),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, matches(r'\{"a":[12],"b":"x"\}')),
    ({"structured_outputs": {"regex": "[a-f]{3}", "json": None}}, matches("[a-f]{3}")),
    ({"structured_outputs": {"choice": ["ab", "cd"]}}, matches("ab|cd")),
    ({"structured_outputs": {"grammar": GBNF}}, matches("[0-9]{2,3}-[0-9]{2,3}")),
]  # fmt: skip


@pytest.fixture(scope="module")
def writer() -> Iterator[RunningServer]:
    """A server whose tokens can spell JSON."""
    running = RunningServer(model=served_model(end_ids=(0,), pieces=JSON_PIECES)).start()
    yield running
    running.stop()


@pytest.fixture
def client(writer: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(("asked", "is_right"), FOLLOWED)
def test_answers_follow_every_form_of_a_constraint(client: openai.OpenAI, asked: dict[str, Any], is_right: Any) -> None:
    answer = client.chat.completions.create(model="fake", messages=ASK, n=3, seed=1, extra_body=asked)  # type: ignore[call-overload]
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert is_right(choice.message.content), choice.message.content
    text = (
        client.completions.create(model="fake", prompt="go", max_tokens=200, seed=2, extra_body=asked).choices[0].text
    )
    assert is_right(text), text


def test_a_json_object_of_structured_outputs_is_any_object(client: openai.OpenAI) -> None:
    asked = {"structured_outputs": {"json_object": True}}
    answer = client.completions.create(model="fake", prompt="go", max_tokens=60, seed=1, extra_body=asked)
    assert answer.choices[0].text.startswith("{")


REFUSED = [
    ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_json and guided_regex are both set"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format and guided_regex are both"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex and structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structural tags are not supported"),
    ({"structured_outputs": {"other": 1}}, "structured_outputs.other is no field of it"),
    ({"structured_outputs": {}}, "structured_outputs has no constraint"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "an option about whitespace"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex is 3"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is []"),
    ({"guided_choice": ["a" * 11_000]}, "guided_choice has texts of 11000 characters"),
    ({"guided_whitespace_pattern": " "}, "it needs guided_json"),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "(a{999}){999}"}, "whitespace_pattern"),
    ({"guided_grammar": 'root ::= "a'}, "guided_grammar cannot be followed: line 1"),
    ({"guided_grammar": 'root ::= other'}, "'other', which is not there"),
    ({"guided_grammar": "start: /(a{999}){999}/"}, "998001 characters once its repetitions are written out"),
    ({"guided_grammar": "start: <|im_end|>"}, "tokens of the model cannot be named"),
    ({"guided_grammar": "start[temperature=0.5]: /a/"}, "sets a temperature"),
    ({"guided_grammar": "start: other"}, "cannot be followed"),
    ({"guided_grammar": 'start: %json {"not": {}}'}, "cannot be followed"),
    ({"guided_grammar": "{}"}, "one grammar in the list grammars"),
    ({"guided_grammar": "x" * 70_000}, "the limit is 65536 bytes"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema is set"),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type is 'structural_tag'"),
    ({"response_format": {"type": "json", "schema": {}, "value": {}}}, "response_format.schema and response_format."),
    ({"bad_words": [""]}, "bad_words[0] is ''"),
    ({"bad_words": ["a"] * 129}, "bad_words has 129 words; the limit is 128"),
    ({"bad_words": ["a"], "regex": "b"}, "regex and bad_words are both set"),
    ({"allowed_token_ids": []}, "allowed_token_ids has 0 tokens"),
    ({"allowed_token_ids": [99_999_999]}, "99999999 is outside the vocabulary"),
    ({"allowed_token_ids": [0], "min_tokens": 2}, "allowed_token_ids leaves no token to begin with: min_tokens is 2"),
    ({"allowed_token_ids": [0, 5], "stop_token_ids": [5], "min_tokens": 2}, "min_tokens is 2, and before so many"),
    ({"allowed_token_ids": [JSON_PIECES.index("x")], "bad_words": ["x"]}, "no token that bad_words does not forbid"),
    ({"allowed_token_ids": [1], "tools": [{"type": "function", "function": {"name": "f"}}]},
     "allowed_token_ids and tools are both set"),
    ({"structural_tag": "x"}, "structural tags are not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "why"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(writer: RunningServer, asked: dict[str, Any], why: str) -> None:
    answer = web.post(f"{writer.url}/v1/chat/completions", json={"messages": ASK, "max_tokens": 4} | asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert why in error["message"]
    assert error["param"].split(".")[0].split("[")[0] in {*asked, "whitespace_pattern"}


def tokens_of(writer: RunningServer, **asked: Any) -> list[list[int]]:
    body = {"prompt": "go", "max_tokens": 60, "ignore_eos": True, "n": 4, "seed": 3, "return_token_ids": True} | asked
    answer = web.post(f"{writer.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_only_allowed_tokens_come(writer: RunningServer) -> None:
    """Ends are not among them, so the answer has its length."""
    for tokens in tokens_of(writer, allowed_token_ids=[5, 9, 12], ignore_eos=False):
        assert len(tokens) == 60
        assert set(tokens) == {5, 9, 12}


def test_bad_words_are_never_completed(writer: RunningServer) -> None:
    """Of a letter that comes, and of three letters that come after each other, only the last token is forbidden."""
    free, *_ = tokens_of(writer)
    texts = [JSON_PIECES[token] for token in free]
    at = next(at for at in range(50) if all(text.isalpha() for text in texts[at : at + 3]))
    word, single = "".join(texts[at : at + 3]), texts[at + 2]
    for bad in (word, single):
        for tokens in tokens_of(writer, bad_words=[bad, "zzz"]):
            assert bad not in "".join(JSON_PIECES[token] for token in tokens)
    without, *_ = tokens_of(writer, bad_words=[word])
    assert without[: at + 2] == free[: at + 2]
    assert without[at + 2] != free[at + 2]


def test_min_tokens_and_ends_work_beside_rules_about_tokens(writer: RunningServer) -> None:
    for tokens in tokens_of(writer, allowed_token_ids=[0, 5], ignore_eos=False, min_tokens=7):
        assert 0 not in tokens[:7]
        assert len(tokens) < 60


def test_an_end_alone_is_allowed_where_nothing_must_come_before_it(writer: RunningServer) -> None:
    assert tokens_of(writer, allowed_token_ids=[0], ignore_eos=False) == [[0]] * 4


def test_a_response_format_beside_tools_gives_a_call_or_an_answer_that_follows_it(client: openai.OpenAI) -> None:
    """As openai-agents, pydantic-ai and LangChain send it."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"enum": [1]}}}}}]
    format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    seen = set()
    for seed in range(3):
        answer = client.chat.completions.create(
            model="fake",
            messages=ASK,
            tools=tools,
            response_format=format,
            n=4,
            seed=seed,
            max_tokens=100,
            parallel_tool_calls=False,  # type: ignore
        )
        for choice in answer.choices:
            seen.add(choice.finish_reason)
            if choice.finish_reason == "tool_calls":
                assert not choice.message.content
                assert all(json.loads(call.function.arguments) in ({}, {"n": 1}) for call in choice.message.tool_calls)
            else:
                assert is_thing(choice.message.content)
    assert seen == {"stop", "tool_calls"}
