"""Fields that clients send beside the usual ones: each is done, or accepted where nothing is lost, or refused."""

import json

import openai
import pytest

from quire.files.generation_defaults import GenerationDefaults
from quire.server.api.sampling import sampling_params
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.vocabulary import TEMPLATE, served_model

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
TEXT = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def chunks(server, path, body) -> list[dict]:
    text = web.post(server.url + path, json=body | {"stream": True}).text
    assert text.endswith("data: [DONE]\n\n"), text
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_chunk_has_the_usage_so_far_as_guidellm_asks_for_it(server, path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(server, path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert not found[-1]["choices"]
    assert all(chunk["usage"]["prompt_tokens"] == found[0]["usage"]["prompt_tokens"] > 0 for chunk in found)
    only = chunks(server, path, body | {"stream_options": {"continuous_usage_stats": True}})
    assert only[-1]["choices"], "the last chunk of its own belongs to include_usage"
    assert only[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("more", [{}, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_padding_makes_chunks_of_short_and_long_tokens_equally_long(server, path, body, more):
    asked = body | {"max_tokens": 30, "stream": True, "stream_options": {"include_obfuscation": True} | more}
    text = web.post(server.url + path, json=asked).text
    events = text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(isinstance(chunk["obfuscation"], str) for chunk in found)
    assert len({len(event.encode()) % 64 for event in events}) == 1
    assert len({len(chunk["obfuscation"]) for chunk in found}) > 1
    plain = "".join(text_of(chunk["choices"][0]) for chunk in chunks(server, path, body | {"max_tokens": 30}))
    assert "".join(text_of(chunk["choices"][0]) for chunk in found if chunk["choices"]) == plain


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
def test_stream_options_that_ask_for_nothing_are_accepted_without_a_stream(server, options):
    assert web.post(f"{server.url}/v1/completions", json=TEXT | {"stream_options": options}).status_code == 200
    streamed = chunks(server, "/v1/completions", TEXT | {"stream_options": options})
    assert all("obfuscation" not in chunk and "usage" not in chunk for chunk in streamed)


NOTHING_LOST = {
    "metadata": {"a": "b"},
    "store": False,
    "safety_identifier": "someone",
    "prompt_cache_key": "key",
}


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_fields_without_which_the_answer_is_the_same_are_accepted_without_a_word(server, path, body):
    answer = web.post(server.url + path, json=body | NOTHING_LOST)
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-fields" not in answer.headers
    assert "service_tier" not in answer.json()


def test_fields_that_ask_for_what_is_not_done_are_named(server):
    asked = CHAT | {"store": True, "verbosity": "low", "logprobs": False, "top_logprobs": 0}
    answer = web.post(f"{server.url}/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-quire-ignored-fields"] == "store,verbosity"
    usual = web.post(f"{server.url}/v1/chat/completions", json=CHAT | {"verbosity": "medium"})
    assert "x-quire-ignored-fields" not in usual.headers


def test_the_answer_names_the_tier_that_was_used(client):
    answer = client.chat.completions.create(model="fake", **CHAT, service_tier="flex")
    assert answer.service_tier == "default"
    (first, *_) = client.chat.completions.create(model="fake", **CHAT, service_tier="auto", stream=True)
    assert first.service_tier == "default"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"max_tokens": 3.0, "n": 1.0, "top_k": -1.0, "stop_token_ids": [0.0]}),
        ("/v1/completions", {"prompt": [1.0, 2.0], "max_tokens": 3.0, "logprobs": 0.0}),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 3.0, "seed": 7.0}),
        ("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 3.0}}),
    ],
)
def test_whole_numbers_may_be_written_as_floats(server, path, body):
    answer = web.post(server.url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-generated-tokens"] == "3"


@pytest.mark.parametrize("wrong", [3.5, 1e300, True, "3"])
def test_other_numbers_than_whole_ones_are_refused_where_integers_are_asked_for(server, wrong):
    refused = web.post(f"{server.url}/v1/completions", json=TEXT | {"max_tokens": wrong}).json()["error"]
    assert refused["param"] == "max_tokens", refused


def test_biases_may_be_pairs_and_an_empty_list(server):
    def bias(given):
        return sampling_params({"logit_bias": given}, GenerationDefaults(), server.model.tokenizer).logit_bias

    assert bias([[3, 100], [4.0, -1]]) == bias({"3": 100, "4": -1}) == {3: 100, 4: -1}
    assert bias([]) == bias({}) == {}
    assert web.post(f"{server.url}/v1/completions", json=TEXT | {"logit_bias": [[3, 100]]}).status_code == 200
    for wrong, param in (
        ([[3]], "logit_bias[0]"),
        ([[3, 1], [0.5, 1]], "logit_bias[1]"),
        ([[3, "a"]], "logit_bias[0][1]"),
    ):
        refused = web.post(f"{server.url}/v1/completions", json=TEXT | {"logit_bias": wrong}).json()["error"]
        assert refused["param"] == param, refused


def prompt_of(server, messages, **more) -> str:
    answer = web.post(f"{server.url}/chat_tokenize", json={"messages": messages} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["templated_text"]


def test_a_refusal_is_rendered_as_the_answer_it_was(server):
    asked, again = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    expected = "user: a\nassistant: no\nuser: b\nassistant: "
    part = [{"type": "refusal", "refusal": "no"}]
    for answered in (
        {"content": None, "refusal": "no"},
        {"refusal": "no"},
        {"content": part},
        {"content": "no", "refusal": None},
        {"content": "n", "refusal": "o"},
        {"content": [{"type": "text", "text": "n"}], "refusal": "o"},
    ):
        assert prompt_of(server, [asked, {"role": "assistant", **answered}, again]) == expected


def ask_with(server, message) -> tuple[int, str, str]:
    body = {"messages": [{"role": "user", "content": "a"} | message], "max_tokens": 1}
    answer = web.post(f"{server.url}/v1/chat/completions", json=body)
    return answer.status_code, answer.headers.get("x-quire-ignored-fields", ""), answer.text


def test_keys_of_messages_that_nothing_reads_are_named(server):
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert ask_with(server, {"weight": 1})[:2] == (200, "messages[].weight")
    assert ask_with(server, {"name": "ann"})[:2] == (200, "messages[].name")
    assert ask_with(server, {"content": [part]})[:2] == (200, "messages[].content[].cache_control")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather"},
        {"role": "assistant", "reasoning_content": "because", "prefix": False},
    ],
)  # fmt: skip
def test_keys_of_messages_that_ask_for_nothing_or_say_nothing_new_are_accepted(server, message):
    assert ask_with(server, message)[:2] == (200, "")


@pytest.mark.parametrize(
    "message",
    [{"prefix": True}, {"partial": True}, {"images": ["aGk="]}, {"audio": {"id": "a"}}, {"function_call": {}}],
)
def test_keys_of_messages_that_would_change_the_answer_are_refused(server, message):
    status, _, text = ask_with(server, message)
    assert status == 400
    assert f"messages[0].{next(iter(message))} is" in text


def test_keys_that_the_template_reads_are_the_templates(make_server):
    template = TEMPLATE.replace("{{ message['content'] }}", "{{ message.get('name') }} {{ message['content'] }}")
    server = make_server(model=served_model(template=template))
    assert ask_with(server, {"name": "ann"})[:2] == (200, "")
    assert prompt_of(server, [{"role": "user", "name": "ann", "content": "a"}]).startswith("user: ann a")


def test_strict_servers_refuse_keys_that_nothing_reads(make_server):
    server = make_server(settings=ServerSettings(strict=True))
    status, _, text = ask_with(server, {"weight": 1})
    assert (status, json.loads(text)["error"]["param"]) == (400, "messages[0].weight")
