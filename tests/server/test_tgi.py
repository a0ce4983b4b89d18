"""The routes of text-generation-inference, through huggingface_hub's client and by hand."""

import json

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError as HubValidationError

from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer
from tests.server.vocabulary import END, TEMPLATE, served_model


@pytest.fixture
def client(server: RunningServer) -> InferenceClient:
    return InferenceClient(model=server.url, timeout=WAIT_S)


def post(server: RunningServer, path: str, body: object) -> httpx.Response:
    return web.post(server.url + path, json=body)


def events(response: httpx.Response) -> list[dict]:
    return [json.loads(line.removeprefix("data:")) for line in response.text.split("\n\n") if line]


def ids(server: RunningServer, text: str) -> list[int]:
    return server.model.tokenizer.encode(text)


def test_text_generation_returns_the_text(client, server):
    text = client.text_generation("hello", max_new_tokens=12, return_full_text=False)
    assert text == server.expected_text(ids(server, "hello"), 12)
    full = client.text_generation("hello", max_new_tokens=12)
    assert full == "hello" + text


def test_text_generation_gives_details(client, server):
    answer = client.text_generation(
        "hello", max_new_tokens=6, details=True, decoder_input_details=True, return_full_text=False, top_n_tokens=1
    )
    details = answer.details
    expected = server.expected(ids(server, "hello"), 6)
    assert [token.id for token in details.tokens] == expected
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    assert (details.finish_reason, details.generated_tokens, details.seed) == ("length", 6, None)
    assert [token.id for token in details.prefill] == ids(server, "hello")
    assert details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:])
    assert [len(each) for each in details.top_tokens] == [1] * 6


def test_text_generation_streams_one_event_a_token(client, server):
    parts = list(client.text_generation("hello", max_new_tokens=15, stream=True, details=True, return_full_text=False))
    text = server.expected_text(ids(server, "hello"), 15)
    assert [part.index for part in parts] == list(range(1, 16))
    assert "".join(part.token.text for part in parts) == text
    assert [part.generated_text for part in parts] == [None] * 14 + [text]
    assert [part.details for part in parts[:-1]] == [None] * 14
    assert (parts[-1].details.finish_reason, parts[-1].details.generated_tokens) == ("length", 15)
    assert parts[-1].details.input_length == 5


def test_a_stream_has_every_field_of_the_schema_and_no_other(server):
    response = post(server, "/generate_stream", {"inputs": "abc", "parameters": {"max_new_tokens": 2, "seed": 5}})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    first, last = events(response)
    assert list(first) == list(last) == ["index", "token", "generated_text", "details"]
    assert list(first["token"]) == ["id", "text", "logprob", "special"]
    assert list(last["details"]) == ["finish_reason", "generated_tokens", "seed", "input_length"]


def test_the_seed_that_was_drawn_gives_the_same_answer_again(server):
    first = post(
        server, "/generate", {"inputs": "abc", "parameters": {"do_sample": True, "details": True, "max_new_tokens": 8}}
    ).json()
    seed = first["details"]["seed"]
    again = post(
        server, "/generate", {"inputs": "abc", "parameters": {"do_sample": True, "seed": seed, "max_new_tokens": 8}}
    ).json()
    assert again["generated_text"] == first["generated_text"]
    without_parameters = {post(server, "/generate", {"inputs": "x" * 505}).json()["generated_text"] for _ in range(3)}
    assert len(without_parameters) == 3  # sampled


def test_best_of_returns_the_others_too(server):
    body = {"inputs": "abc", "parameters": {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 5}}
    answer = post(server, "/generate", body).json()

    def mean(tokens):
        return sum(token["logprob"] for token in tokens) / len(tokens)

    others = answer["details"]["best_of_sequences"]
    assert len(others) == 2
    assert all(mean(other["tokens"]) <= mean(answer["details"]["tokens"]) for other in others)
    assert all(other["generated_text"] != answer["generated_text"] for other in others)


def test_a_stop_string_is_found_inside_and_kept_at_the_end(server):
    whole = server.expected_text(ids(server, "stop"), 60)
    stop = whole[30:33]
    expected = whole[: whole.index(stop) + 3]
    body = {"inputs": "stop", "parameters": {"max_new_tokens": 60, "stop": [stop], "details": True}}
    answer = post(server, "/generate", body).json()
    assert answer["generated_text"] == expected
    assert answer["details"]["finish_reason"] == "stop_sequence"
    last = events(post(server, "/generate_stream", body))[-1]
    assert (last["generated_text"], last["details"]["finish_reason"]) == (expected, "stop_sequence")


def test_the_end_token_is_shown_as_special_and_not_in_the_text(make_server):
    server = make_server(model=served_model(end_ids=(0,)))
    for prompt in ("abc", "bcd", "cde", "def", "efg", "fgh"):
        tokens = server.expected(ids(server, prompt), 300)
        if 0 in tokens:
            break
    last = events(post(server, "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": 300}}))[-1]
    assert last["token"] == {"id": 0, "text": END, "logprob": last["token"]["logprob"], "special": True}
    assert last["details"]["finish_reason"] == "eos_token"
    assert last["generated_text"] == server.model.tokenizer.decode(tokens[: tokens.index(0)])


def test_headers_say_where_the_time_went(server):
    response = post(server, "/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 4}})
    assert response.headers["x-prompt-tokens"] == "3"
    assert response.headers["x-generated-tokens"] == "4"
    assert response.headers["x-compute-characters"] == "3"
    for name in ("total", "validation", "queue", "inference"):
        assert 0 <= int(response.headers[f"x-{name}-time"]) < WAIT_S * 1000
    assert int(response.headers["x-time-per-token"]) <= int(response.headers["x-total-time"])
    assert 0 < float(response.headers["x-compute-time"]) < WAIT_S


def test_truncate_keeps_the_right_end(server):
    short = post(server, "/generate", {"inputs": "world", "parameters": {"max_new_tokens": 5}}).json()
    cut = post(
        server, "/generate", {"inputs": "hello world", "parameters": {"max_new_tokens": 5, "truncate": 5}}
    ).json()
    assert cut == short


def test_chat_completion_through_the_hub_client(client, server):
    messages = [{"role": "user", "content": "hi"}]
    prompt = ids(server, "user: hi\nassistant: ")
    whole = client.chat_completion(messages, max_tokens=9, temperature=0)
    assert whole.choices[0].message.content == server.expected_text(prompt, 9)
    chunks = list(client.chat_completion(messages, max_tokens=9, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_invocations_take_whatever_comes(server):
    generated = post(server, "/invocations", {"inputs": "abc", "parameters": {"max_new_tokens": 3}}).json()
    assert generated[0]["generated_text"].startswith("abc")
    chat = post(server, "/invocations", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}).json()
    assert chat["object"] == "chat.completion"
    completion = post(server, "/invocations", {"prompt": "abc", "max_tokens": 3}).json()
    assert completion["object"] == "text_completion"
    nothing = post(server, "/invocations", {"input": "abc"})
    assert (nothing.status_code, nothing.json()["error_type"]) == (422, "validation")


def test_tokens_are_shown_with_their_bytes(server):
    found = post(server, "/tokenize", {"inputs": "aé b"}).json()
    assert [(one["text"], one["start"], one["stop"]) for one in found] == [
        ("a", 0, 1), ("é", 1, 3), ("é", 1, 3), (" ", 3, 4), ("b", 4, 5),
    ]  # fmt: skip
    tokens = post(server, "/tokenize", {"prompt": "aé b"}).json()
    assert tokens == {"count": 5, "max_model_len": 512, "tokens": [one["id"] for one in found]}
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "aé b"}


def test_a_remote_tokenizer_works_as_evaluation_harnesses_use_it(server):
    """lm-eval's RemoteTokenizer: these requests, in this order."""
    info = web.get(f"{server.url}/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == (END, None, None)
    assert info["chat_template"] == TEMPLATE
    assert info["added_tokens_decoder"]["0"]["content"] == END
    found = post(server, "/tokenize", {"prompt": f"test{END}", "add_special_tokens": False}).json()
    assert found["tokens"] == ids(server, f"test{END}")
    assert post(server, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": f"test{END}"}


def test_token_strings_come_where_they_are_asked_for(server):
    asked = post(server, "/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    assert (asked["token_strs"], asked["count"]) == (["a", "Ġ", "b"], 3)


def test_conversations_are_tokenised_with_all_that_their_prompt_depends_on(server):
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "continue_final_message": True,
    }
    tokens = post(server, "/tokenize", chat).json()["tokens"]
    shown = post(server, "/chat_tokenize", chat).json()["tokenize_response"]
    assert tokens == [each["id"] for each in shown]
    assert tokens != post(server, "/tokenize", {"messages": chat["messages"]}).json()["tokens"]


def test_a_chat_is_shown_as_its_template_has_it(server):
    answer = post(server, "/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert answer["templated_text"] == "user: hi\nassistant: "
    assert "".join(one["text"] for one in answer["tokenize_response"]) == answer["templated_text"]


def test_info_names_the_model_and_its_limits(server):
    info = web.get(f"{server.url}/info").json()
    assert list(info) == [
        "model_id", "model_sha", "model_pipeline_tag", "max_concurrent_requests", "max_best_of", "max_stop_sequences",
        "max_input_tokens", "max_total_tokens", "validation_workers", "max_client_batch_size", "router", "version",
        "sha", "docker_label",
    ]  # fmt: skip
    assert (info["model_id"], info["max_total_tokens"]) == ("fake", 512)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 2}, "best_of is 2; without sampling"),
        ({"best_of": 99, "do_sample": True}, "best_of is 99; it must be between 1 and 20"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"typical_p": 0.0}, "typical_p is 0.0"),
        ({"top_k": -3}, "top_k is -3"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 600}, "together 603; the limit is 512"),
        ({"truncate": 0}, "truncate is 0"),
        ({"truncate": 9999}, "truncate is 9999; it must be between 1 and 512"),
        ({"stop": ["a"] * 17}, "it must be at most 16"),
        ({"stop": [""]}, "stop[0] is empty"),
        ({"top_n_tokens": 21}, "top_n_tokens is 21"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"max_new_tokens": "ten"}, "parameters.max_new_tokens is 'ten'"),
        ({"watermark": True}, "parameters.watermark is True: watermarking is not supported"),
        ({"grammar": {"type": "regexp", "value": "a"}}, "grammar.type is 'regexp'"),
        ({"grammar": {"type": "json_schema"}}, "grammar.value is None"),
    ],
)  # fmt: skip
def test_a_bad_parameter_is_refused_by_name(server, parameters, message):
    response = post(server, "/generate", {"inputs": "abc", "parameters": parameters})
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert message in response.json()["error"]


def test_what_streams_refuses_what_cannot(server):
    for parameters in ({"best_of": 2, "do_sample": True}, {"decoder_input_details": True}):
        response = post(server, "/generate_stream", {"inputs": "abc", "parameters": parameters})
        assert response.status_code == 422
        assert "cannot be streamed" in response.json()["error"]


def test_the_hub_client_knows_our_errors(client):
    with pytest.raises(HubValidationError, match=r"top_p is 1\.5"):
        client.text_generation("abc", top_p=1.5)


NEARLY = [{"top_p": 1.0}, {"temperature": 0.0}, {"typical_p": 1.0}, {"top_k": 0}]


@pytest.mark.parametrize("parameters", NEARLY)
def test_what_means_something_is_accepted_unless_exactness_is_asked_for(make_server, server, parameters):
    body = {"inputs": "abc", "parameters": parameters | {"max_new_tokens": 3}}
    assert post(server, "/generate", body).status_code == 200
    strict = make_server(settings=ServerSettings(tgi_strict=True))
    assert post(strict, "/generate", body).status_code == 422


def test_temperature_zero_is_greedy(server):
    answer = post(
        server, "/generate", {"inputs": "abc", "parameters": {"temperature": 0.0, "max_new_tokens": 9}}
    ).json()
    assert answer["generated_text"] == server.expected_text(ids(server, "abc"), 9)


def test_what_a_prompt_depends_on_is_read_when_a_chat_is_shown(server):
    chat = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False, "colour": "red"}
    answer = post(server, "/chat_tokenize", chat)
    assert answer.json()["templated_text"] == "user: hi\n"
    assert answer.headers["x-quire-ignored-fields"] == "colour"


def test_tokenising_refuses_other_models_and_two_things_at_once(server):
    for path, body in (
        ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ):  # fmt: skip
        assert post(server, path, body | {"model": "other"}).status_code == 404
        assert post(server, path, body | {"model": "fake"}).status_code == 200
        assert post(server, path, body | {"colour": 1}).headers["x-quire-ignored-fields"] == "colour"
    both = post(server, "/tokenize", {"prompt": "a", "messages": []})
    assert (both.status_code, "not two of them" in both.json()["error"]) == (422, True)


def test_a_stream_that_the_route_does_not_have_is_told_of(server):
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 2}, "stream": True}
    answer = post(server, "/generate", body)
    assert answer.headers["x-quire-ignored-fields"] == "stream"
    assert "x-quire-ignored-fields" not in post(server, "/generate_stream", body).headers


def test_the_kind_of_machine_can_be_named(make_server):
    server = make_server(settings=ServerSettings(compute_type="gpu+optimized"))
    answer = post(server, "/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 1}})
    assert answer.headers["x-compute-type"] == "gpu+optimized"
