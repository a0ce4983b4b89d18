"""Any wrong input gets a 4xx that names the fault."""

import gzip
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.server.settings import ServerSettings
from tests.patience import WAIT_S

ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens",
          "/v1/responses", "/v1/responses/input_tokens",
          "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
          "/generate", "/generate_stream", "/", "/invocations", "/tokenize",
          "/chat_tokenize", "/detokenize", "/vertex", "/v2/models/fake/versions/1/infer"]  # fmt: skip


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


def message_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"text"', b"{}", b'{"prompt": NaN}', b'{"inputs": "\xff"}', b"\xff\xfe",
        b'{"messages": 1e999, "prompt": 1e999, "inputs": 1e999}', b"[" * 100_000,
        b'{"inputs": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"prompt": ' + b'{"a":' * 80 + b"1" + b"}" * 81,
        b'{"inputs": "\\ud800", "prompt": "\\ud800", "tokens": ["\\ud800"]}',
        b'{"inputs": 5, "prompt": 5, "messages": 5, "tokens": 5, "input": 5}',
        b'{"inputs": [], "prompt": [], "messages": [], "tokens": [-1], "input": []}',
        b'{"prompt": [[]], "inputs": null, "messages": [null], "tokens": [99999999999999999999], "input": [null]}',
    ],
)  # fmt: skip
def test_a_body_that_is_not_a_request_is_refused(http, route, body):
    response = http.post(route, content=body)
    assert 400 <= response.status_code < 500, response.text
    assert message_of(response)


@pytest.mark.parametrize("route", ROUTES)
def test_a_compressed_body_is_refused_by_its_header(http, route):
    body = gzip.compress(b'{"prompt": "a", "inputs": "a"}')
    response = http.post(route, content=body, headers={"Content-Encoding": "gzip"})
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    assert 400 <= response.status_code < 500
    assert message_of(response) == "Content-Encoding is 'gzip'; only bodies that are not compressed are read"
    for named in ("", "Identity"):
        response = http.post(route, content=body, headers={"Content-Encoding": named})
        assert "Content-Encoding" not in message_of(response)


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/", "/invocations"])
def test_an_empty_text_is_refused_where_it_would_be_continued(http, route):
    response = http.post(route, json={"inputs": ""})
    assert (response.status_code, message_of(response)) == (422, "inputs is empty; it must have at least 1 character")


def test_a_body_that_is_too_long_is_refused_whether_it_says_so_or_not(http):
    big = json.dumps({"prompt": "a" * 10_000_000}).encode()
    told = http.post("/v1/completions", content=big)
    assert told.status_code == 413
    assert "the limit is 2000000" in message_of(told)
    pieces = (big[at : at + 65536] for at in range(0, len(big), 65536))
    assert http.post("/v1/completions", content=pieces).status_code == 413


COMPLETION = {"prompt": "abc", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 2**70}, "max_tokens is 1180591620717411303424, the prompt has"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5: Expected `int | null`, got `float`"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": 1e300}, "temperature is 1e+300; it must be between 0 and 100"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": -0.1}, "top_p is -0.1; it must be between 0 and 1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 1e30}, "repetition_penalty is 1e+30; it must be between 0.01 and 100"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty is 1e-320; it must be between 0.01 and 100"),
        ({"typical_p": 1e-320}, "typical_p is 1e-320; it must be between 1e-30 and 1"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"n": 0}, "n is 0"),
        ({"n": 10**9}, "n is 1000000000; it must be between 1 and 20"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"priority": 2**40}, "priority is 1099511627776"),
        ({"min_tokens": 3}, "min_tokens is 3; it must be at most 2"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"stop": ["a"] * 17}, "the number of strings in stop is 17; it must be at most 16"),
        ({"stop": ""}, "stop[0] is empty"),
        ({"stop": ["a", "b" * 200_000]}, "stop[1] has 200000 characters; the limit is 4096"),
        ({"stop_token_ids": [50]}, "token id 50 is outside the vocabulary: 0 to 49"),
        ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x'"),
        ({"logit_bias": {"50": 1}}, "logit_bias has the token 50; the vocabulary has 50"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1] is 101"),
        ({"stream_options": {"include_usage": True}}, "stream_options has include_usage; it needs stream to be true"),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'; it can be text, json_object"),
        ({"service_tier": "gold"}, "service_tier is 'gold': Invalid enum value 'gold'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("route", "base"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_a_bad_field_is_refused_by_name_value_and_limit(http, route, base, fields, message):
    response = http.post(route, json=base | fields)
    assert response.status_code == 400, response.text
    assert message in message_of(response)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "x"}, "suffix is 'x': filling in before a suffix is not supported"),
        ({"best_of": 1, "n": 2}, "best_of is 1; it must be between 2 and 20"),
        ({"best_of": 2, "stream": True}, "cannot be streamed"),
        ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
        ({"prompt": [1, "a"]}, "prompt[0] is 1; prompts are all texts"),
        ({"prompt": [[50]]}, "token id 50 is outside the vocabulary"),
        ({"prompt": [2**65]}, "token id 36893488147419103232 is outside the vocabulary"),
        ({"prompt": ["a"] * 257}, "the number of prompts is 257; it must be at most 256"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt[1] is empty; it must have at least 1 token"),
        ({"prompt": [""]}, "prompt[0] is empty"),
    ],
)
def test_a_bad_completion_field_is_refused(http, fields, message):
    response = http.post("/v1/completions", json=COMPLETION | fields)
    assert response.status_code == 400
    assert message in message_of(response)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs is 2; it needs logprobs to be true"),
        ({"top_logprobs": 21, "logprobs": True}, "logprobs is 21; it must be between 0 and 20"),
        ({"tools": [{}]}, "tools[0].function is None"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role is 'king'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only 'text' is supported"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is None"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "cannot both be true"),
        (
            {"messages": [{"role": "user", "content": "a" * 600}]},
            "the prompt is too long: it has 618 tokens; the limit is 512",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": "a" * 600}}]},
            "the prompt is too long",
        ),
    ],
)
def test_a_bad_chat_field_is_refused(http, fields, message):
    response = http.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 400
    assert message in message_of(response)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(http):
    full = "a" * 512
    chat = {"messages": [{"role": "user", "content": "a" * (512 - len("user: \nassistant: "))}]}
    for route, body, status in (
        ("/v1/chat/completions", chat, 400),
        ("/generate", {"inputs": full}, 422),
        ("/generate_stream", {"inputs": full}, 422),
        ("/v1/completions", {"prompt": full, "max_tokens": 1}, 400),
    ):
        response = http.post(route, json=body)
        assert response.status_code == status
        assert "512" in message_of(response)


@pytest.mark.parametrize("prompt", ["a" * 600, [1] * 600, ["a", "a" * 600], [[1], [1] * 600]])
def test_a_prompt_that_is_too_long_is_named(http, prompt):
    error = http.post("/v1/completions", json={"prompt": prompt}).json()["error"]
    assert error["param"] == ("prompt[1]" if len(prompt) == 2 else "prompt")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_refused_as_that(http, route, body):
    assert message_of(http.post(route, content=body)) == "body is empty; it must be JSON"


@pytest.mark.parametrize("text", ["\ud800", "b\udc00", "a\ud83d", "\ud800 and so on"])
@pytest.mark.parametrize("last", [True, False])
def test_half_a_surrogate_pair_is_refused_anywhere(http, text, last):
    body = COMPLETION | ({"stop": text} if last else {"stop": text, "user": "somebody"})
    message = message_of(http.post("/v1/completions", content=json.dumps(body)))
    assert "surrogate pair (byte " in message


def test_a_body_that_is_cut_off_is_refused_as_that(http):
    body = json.dumps(COMPLETION | {"user": "\U0001f600"})
    assert http.post("/v1/completions", content=body).status_code == 200
    for cut in (body[:-1], body[:-2], body[: len(body) // 2]):
        assert message_of(http.post("/v1/completions", content=cut)) == "body: not valid JSON: Input data was truncated"


def test_values_that_ask_for_nothing_are_taken(http):
    inert = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "store": False, "metadata": None}
    assert http.post("/v1/chat/completions", json=CHAT | inert).status_code == 200


def test_unknown_fields_are_told_of_or_refused(http, make_server):
    response = http.post("/v1/completions", json=COMPLETION | {"colour": "red", "bad\r\nname": 1})
    assert response.status_code == 200
    assert response.headers["x-quire-ignored-fields"] == "colour,badname"
    strict = make_server(settings=ServerSettings(strict=True))
    refused = httpx.post(f"{strict.url}/v1/completions", json=COMPLETION | {"colour": "red"}, timeout=WAIT_S)
    assert refused.status_code == 400
    assert "colour is not a field of this route" in message_of(refused)


def test_unknown_paths_and_methods_are_not_errors_of_ours(http):
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    assert message_of(http.put("/")) == "/ takes GET and POST, not PUT"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "inputs", "parameters", "instances", "outputs", "id",
     "tokens", "max_tokens", "temperature", "top_p", "top_k", "n", "stop",
     "seed", "stream", "stream_options", "logit_bias", "logprobs", "echo", "best_of", "stop_token_ids", "min_tokens",
     "max_completion_tokens", "tools", "tool_choice", "response_format", "grammar", "chat_template_kwargs", "documents",
     "cache_salt", "priority", "user"]
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(ROUTES), st.dictionaries(NAMES, JSON, max_size=6))
def test_no_body_makes_the_server_fail(http, route, body):
    text = json.dumps({"prompt": "ab", "inputs": "ab", "messages": CHAT["messages"]} | body)
    response = http.post(route, content=text.encode("utf-8", "surrogatepass"))
    assert response.status_code < 500, (route, body, response.text)
