"""Answers that follow a grammar, through real clients. What the fake samples is random but for its mask."""

import json
import re
from collections.abc import Callable, Iterator

import openai
import pytest
from huggingface_hub import InferenceClient

from quire.server.settings import ServerSettings
from tests import web
from tests.server.running import RunningServer
from tests.server.vocabulary import JSON_PIECES, served_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "size": {"type": "integer", "minimum": 1, "maximum": 55},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
AS_OPENAI = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ASK = [{"role": "user", "content": "tell me"}]


@pytest.fixture(scope="module")
def writer() -> Iterator[RunningServer]:
    """A server whose tokens can spell JSON."""
    running = RunningServer(model=served_model(end_ids=(0,), pieces=JSON_PIECES)).start()
    yield running
    running.stop()


@pytest.fixture
def client(writer: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def hugging(writer: RunningServer) -> InferenceClient:
    return InferenceClient(writer.url)


def check(text: str) -> None:
    thing = json.loads(text)
    assert list(thing) == ["name", "tags", "size"]
    assert thing["name"] in ("ann", "bob")
    assert len(thing["tags"]) <= 2
    assert all(len(tag) <= 3 for tag in thing["tags"])
    assert 1 <= thing["size"] <= 55


def test_a_chat_follows_a_schema(client):
    for seed in range(4):
        answer = client.chat.completions.create(
            model="fake", messages=ASK, response_format=AS_OPENAI, seed=seed, n=3, logprobs=True
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert len(choice.logprobs.content) > 10
            check(choice.message.content)
        assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_chat_follows_a_schema_while_it_streams(client):
    stream = client.chat.completions.create(model="fake", messages=ASK, response_format=AS_OPENAI, stream=True, seed=1)
    check("".join(chunk.choices[0].delta.content or "" for chunk in stream))


def test_json_objects_are_objects_and_completions_follow_too(client):
    asked = {"type": "json_object"}
    for seed in range(5):
        answer = client.completions.create(
            model="fake", prompt="go", max_tokens=400, seed=seed, extra_body={"response_format": asked}
        )
        choice = answer.choices[0]
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)
    text = client.chat.completions.create(
        model="fake", messages=ASK, max_tokens=9, seed=1, response_format={"type": "text"}
    )
    assert text.choices[0].message.content


def test_max_tokens_cuts_an_answer_off_in_the_middle(client):
    answer = client.chat.completions.create(model="fake", messages=ASK, response_format=AS_OPENAI, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json", "value": {key: value for key, value in SCHEMA.items() if key != "type"}},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_object", "value": {"required": SCHEMA["required"], "properties": SCHEMA["properties"]}},
        {"type": "json_schema", "value": {"name": "thing", "schema": SCHEMA}},
    ],
)
def test_generate_follows_a_schema_in_each_way_to_say_so(hugging, grammar):
    how = {"max_new_tokens": 200, "do_sample": True, "return_full_text": False}
    check(hugging.text_generation("go", grammar=grammar, seed=3, **how))


def test_generate_follows_a_regular_expression(hugging, writer):
    pattern = "[a-f]{3}-(on|off)\\.[12]*"
    how = {"grammar": {"type": "regex", "value": pattern}, "max_new_tokens": 60, "do_sample": True}
    for seed in range(5):
        found = hugging.text_generation("go", seed=seed, details=True, return_full_text=False, **how)
        assert found.details.finish_reason == "eos_token"
        assert re.fullmatch(pattern, found.generated_text)
    pieces = list(hugging.text_generation("go", stream=True, **how))
    assert re.fullmatch(pattern, "".join(pieces).removesuffix("<|end|>"))
    best = web.post(f"{writer.url}/generate", json={"inputs": "go", "parameters": how | {"best_of": 2}}).json()
    assert re.fullmatch(pattern, best["generated_text"])


def test_stop_strings_end_guided_answers_too(client):
    asked = {"type": "regex", "value": "[a-f]{3}stop[a-z]{20}"}
    answer = client.completions.create(
        model="fake", prompt="go", max_tokens=60, stop=["top"], extra_body={"response_format": asked}
    )
    assert re.fullmatch("[a-f]{3}s", answer.choices[0].text)


def one_of(number: int, value: int) -> dict[str, object]:
    return {"properties": {f"k{number}": {"const": value}}}


REFUSED = [
    ({"type": "xml"}, "response_format.type is 'xml'"),
    ({}, "response_format.type is None"),
    ({"type": "json_schema"}, "response_format.json_schema is None; it must be an object with a schema"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema is None"),
    ({"type": "json", "value": "{"}, "response_format.value: not valid JSON"),
    ({"type": "json", "value": 3}, "it must be a JSON schema"),
    ({"type": "regex", "value": {}}, "it must be a regular expression"),
    ({"type": "regex", "value": "(a"}, "regex parse error"),
    ({"type": "json", "value": {"type": "nothing"}}, "response_format cannot be followed"),
    ({"type": "json", "value": {"$ref": "file:///etc/passwd"}}, "response_format cannot be followed"),
    ({"type": "json", "value": {"$ref": "#"}}, "response_format cannot be followed"),
    # What explodes
    ({"type": "regex", "value": "(a{1000}){1000}"}, "1000000 characters once its repetitions are written out"),
    ({"type": "regex", "value": "x{999999}"}, "the limit is 10000"),
    ({"type": "json", "value": {"type": "string", "pattern": "^(a{999}){999}$"}}, "response_format.pattern"),
    ({"type": "json", "value": {"const": "x" * 9999}}, "a string of 9999 characters"),
    ({"type": "json", "value": {"type": "integer", "multipleOf": 999983}}, "too complex"),
    ({"type": "json", "value": {"type": "string", "allOf": [{"pattern": f".*a.{{{n}}}"} for n in range(20)]}},
     "too complex"),
    ({"type": "json", "value": {"allOf": [{"anyOf": [one_of(n, 1), one_of(n, 2)]} for n in range(18)]}}, "too large"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "why"), REFUSED)
def test_what_cannot_be_followed_is_refused(client, asked, why):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="fake", messages=ASK, response_format=asked)
    assert why in refused.value.message
    assert refused.value.body["param"].startswith("response_format")


@pytest.mark.parametrize(
    ("changes", "why"), [({"ignore_eos": True}, "ignore_eos is true"), ({"min_tokens": 2}, "min_tokens")]
)
def test_what_contradicts_a_grammar_is_refused(client, changes, why):
    with pytest.raises(openai.BadRequestError, match=why):
        client.chat.completions.create(model="fake", messages=ASK, response_format=AS_OPENAI, extra_body=changes)


def test_generate_refuses_with_its_own_status(writer):
    for grammar in ({"type": "regex", "value": "(a"}, {"type": "nothing"}):
        body = {"inputs": "go", "parameters": {"grammar": grammar}}
        refused = web.post(f"{writer.url}/generate", json=body)
        assert refused.status_code == 422
        assert refused.json()["error_type"] == "validation"
        assert refused.json()["error"].startswith("grammar")


def test_schemas_need_properties_where_text_generation_inference_wants_them(make_server: Callable[..., RunningServer]):
    strict = make_server(settings=ServerSettings(tgi_strict=True), model=served_model(end_ids=(0,), pieces=JSON_PIECES))
    for schema, status in ((SCHEMA, 200), ({"type": "object"}, 422)):
        body = {"inputs": "go", "parameters": {"grammar": {"type": "json", "value": schema}, "max_new_tokens": 5}}
        assert web.post(f"{strict.url}/generate", json=body).status_code == status


def test_grammars_can_be_switched_off_and_need_an_end(make_server: Callable[..., RunningServer]):
    off = make_server(settings=ServerSettings(disable_grammar_support=True), model=served_model(end_ids=(0,)))
    endless = make_server()
    for server, why in ((off, "--disable-grammar-support"), (endless, "no end-of-sequence token")):
        body = {"messages": ASK, "response_format": {"type": "json_object"}}
        refused = web.post(f"{server.url}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert why in refused.json()["error"]["message"]
