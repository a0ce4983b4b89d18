"""--tgi-strict: the answers of text-generation-inference, right or wrong."""

import json
from dataclasses import replace

import httpx
import pytest

from quire.files.generation_defaults import GenerationDefaults
from quire.server.api.openai.requests import ChatRequest, CompletionRequest
from quire.server.api.tgi.strict import MAX_PASS_TOKENS, EndAnchoredStops, read
from quire.server.settings import ServerSettings
from tests import web
from tests.server.running import RunningServer
from tests.server.vocabulary import served_model

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
COMPLETION = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


@pytest.fixture(scope="module")
def strict():
    running = RunningServer(settings=ServerSettings(tgi_strict=True)).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def ending():
    """One whose token 0 ends answers."""
    running = RunningServer(settings=ServerSettings(tgi_strict=True), model=served_model(end_ids=(0,))).start()
    yield running
    running.stop()


def post(server: RunningServer, path: str, body: object, **options) -> httpx.Response:
    return web.post(server.url + path, json=body, **options)


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data:").strip() for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ends_early(server: RunningServer, longest: int = 40) -> tuple[str, int]:
    """A prompt whose greedy answer ends by itself, and after how many tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    for prompt in (first + second for first in letters for second in letters):
        tokens = server.expected(server.model.tokenizer.encode(prompt), longest)
        if 0 in tokens[1:] and tokens[0] != 0:
            return prompt, tokens.index(0) + 1
    raise AssertionError("nothing ends")


def test_a_chat_answer_has_no_id_and_no_more_than_there_is(strict):
    answer = post(strict, "/v1/chat/completions", CHAT).json()
    assert list(answer) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert answer["id"] == ""
    assert answer["system_fingerprint"].endswith("-native")
    assert list(answer["usage"]) == ["prompt_tokens", "completion_tokens", "total_tokens"]
    assert list(answer["choices"][0]["message"]) == ["role", "content"]


def test_every_chunk_of_a_chat_names_the_role(strict):
    chunks = events(post(strict, "/v1/chat/completions", CHAT | {"stream": True}))
    assert [list(chunk["choices"][0]["delta"]) for chunk in chunks] == [["role", "content"]] * len(chunks)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == post(strict, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"]


def test_endings_have_other_names(ending):
    prompt, length = ends_early(ending)
    body = {"prompt": prompt, "max_tokens": length + 5, "temperature": 0}
    assert post(ending, "/v1/completions", body).json()["choices"][0]["finish_reason"] == "eos_token"
    chunks = events(post(ending, "/v1/completions", body | {"stream": True}))
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [""] * (len(reasons) - 1) + ["eos_token"]
    template = [{"role": "user", "content": "hi"}]
    stopped = post(ending, "/v1/chat/completions", {"messages": template, "max_tokens": 30, "temperature": 0})
    text = stopped.json()["choices"][0]["message"]["content"]
    stop = text[3:4]
    answer = post(ending, "/v1/chat/completions", stopped_by(stop)).json()["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"][-1]) == ("stop_sequence", stop)


def stopped_by(stop: str) -> dict:
    return CHAT | {"stop": [stop], "max_tokens": 30}


def test_length_is_looked_at_before_the_end(ending):
    prompt, length = ends_early(ending)
    parameters = {"max_new_tokens": length, "details": True, "do_sample": False}
    at_limit = post(ending, "/generate", {"inputs": prompt, "parameters": parameters}).json()
    assert at_limit["details"]["finish_reason"] == "length"
    parameters["max_new_tokens"] += 1
    below = post(ending, "/generate", {"inputs": prompt, "parameters": parameters}).json()
    assert below["details"]["finish_reason"] == "eos_token"
    assert below["generated_text"] == at_limit["generated_text"]


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize("fields", [{"top_p": 1.0}, {"seed": -1}])
def test_what_is_refused_there_is_refused_in_its_words(strict, route, body, fields):
    answer = post(strict, route, body | fields)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert next(iter(fields)) in answer.json()["error"]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_stream_that_is_refused_is_an_event_under_200(strict, route, body):
    answer = post(strict, route, body | {"top_p": 1.0, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    (error,) = events(answer)
    assert error["error"]["http_status_code"] == 422
    assert "top_p is 1.0" in error["error"]["message"]
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_native_stream_that_is_refused_is_an_event_under_200_and_counted(make_server):
    strict = make_server(settings=ServerSettings(tgi_strict=True))
    answer = post(strict, "/generate_stream", {"inputs": "abc", "parameters": {"top_p": 1.0}})
    assert answer.status_code == 200
    assert events(answer) == [{"error": "top_p is 1.0; it must be above 0 and below 1", "error_type": "validation"}]
    assert strict.service.metrics.failures["validation"] == 1


def test_a_chat_has_one_answer_and_its_biases_are_not_read(strict):
    greedy = post(strict, "/v1/chat/completions", CHAT).json()["choices"]
    biased = post(strict, "/v1/chat/completions", CHAT | {"n": 3, "logit_bias": {"3": 100}})
    assert biased.json()["choices"] == greedy
    assert biased.headers["x-quire-ignored-fields"] == "n,logit_bias"


def test_a_presence_penalty_becomes_a_repetition_penalty_of_a_chat():
    chat, unread = read(ChatRequest(messages=[], presence_penalty=-0.5))
    assert (chat.repetition_penalty, chat.presence_penalty, unread) == (1.5, None, [])
    completion, _ = read(CompletionRequest(prompt="abc", presence_penalty=-0.5))
    assert (completion.repetition_penalty, completion.presence_penalty) == (None, -0.5)  # not a field of its there


def test_a_prompt_is_scored_only_where_the_server_allows_it(strict, make_server):
    body = {"inputs": "abc", "parameters": {"decoder_input_details": True, "max_new_tokens": 2}}
    assert post(strict, "/generate", body).json()["details"]["prefill"] == []
    allowed = make_server(settings=ServerSettings(tgi_strict=True, enable_prefill_logprobs=True))
    assert len(post(allowed, "/generate", body).json()["details"]["prefill"]) == 3


def test_the_sampling_that_a_model_asks_for_is_not_looked_at(make_server):

    model = replace(served_model(), defaults=GenerationDefaults(temperature=0.0, max_new_tokens=3))
    texts = {}
    for mode in (False, True):
        server = make_server(settings=ServerSettings(tgi_strict=mode), model=model)
        body = {"prompt": "abc", "seed": 1}
        texts[mode] = post(server, "/v1/completions", body).json()["usage"]["completion_tokens"]
    assert texts == {False: 16, True: 509}


def test_models_and_keys(make_server):
    server = make_server(settings=ServerSettings(tgi_strict=True, api_key="key"))
    assert web.get(f"{server.url}/v1/models").json()["data"] == [
        {"id": "fake", "object": "model", "created": 0, "owned_by": "fake"}
    ]
    refused = post(server, "/v1/completions", COMPLETION)
    assert (refused.status_code, refused.text) == (401, "")


def test_stop_strings_are_seen_at_the_ends_of_tokens_in_one_pass():
    stops = EndAnchoredStops(("stop", "a.b"))
    assert stops.push("st") == ("st", None)
    assert stops.push("op here") == ("op here", None)  # inside a token
    assert stops.push(" axb") == (" axb", None)  # a point is a point
    assert stops.push(" sto") == (" sto", None)
    assert stops.push("p") == ("p", "stop")
    late = EndAnchoredStops(("stop",))
    for _ in range(MAX_PASS_TOKENS - 2):
        late.push("x")
    late.push("sto")  # the last but one of a pass
    assert late.push("p") == ("p", None)
    far = EndAnchoredStops(("a" + "b" * 300,))
    assert [far.push(piece)[1] for piece in ("a", "b" * 299, "b")] == [None, None, None]  # beyond the window


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_whole_answers_say_where_the_time_went_in_either_mode(strict, server, route, body):
    for one in (strict, server):
        headers = post(one, route, body).headers
        assert headers["x-generated-tokens"] == "5"
        assert int(headers["x-compute-characters"]) > 2
        assert int(headers["x-total-time"]) >= 0
