"""The routes of other platforms: Vertex AI's and KServe's."""

import httpx
import pytest

from quire.server.settings import ServerSettings
from tests import web

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
GENERATE = {"inputs": "abc", "parameters": {"max_new_tokens": 6}}
MODEL = "/v2/models/fake/versions/1"


def post(server, path: str, body: object) -> httpx.Response:
    return web.post(server.url + path, json=body)


def ids(server, text: str) -> list[int]:
    return server.model.tokenizer.encode(text)


def test_instances_of_both_kinds_are_predicted_in_order(server):
    answer = post(server, "/vertex", {"instances": [GENERATE, CHAT, GENERATE | {"inputs": "xyz"}]})
    assert answer.json() == {
        "predictions": [
            server.expected_text(ids(server, "abc"), 6),
            server.expected_text(ids(server, "user: hi\nassistant: "), 6),
            server.expected_text(ids(server, "xyz"), 6),
        ]
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"instances": []}, "the number of instances is 0; it must be between 1 and 256"),
        ({"instances": [{}]}, "instances[0]: inputs and messages are missing"),
        ({"instances": [GENERATE, CHAT | {"stream": True}]}, "instances[1]: stream is True"),
        ({"instances": [CHAT | {"n": 2}]}, "instances[0]: n is 2"),
        ({"instances": [{"inputs": "abc", "parameters": {"top_p": 7}}]}, "top_p is 7"),
        ({"instances": "abc"}, "instances is 'abc'"),
        ({}, "instances"),
    ],
)
def test_instances_that_cannot_be_are_refused(server, body, message):
    answer = post(server, "/vertex", body)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert message in answer.json()["error"]


def test_the_platform_chooses_its_routes(make_server):
    settings = ServerSettings(aip_predict_route="/v1/predict", aip_health_route="/healthy", api_key="key")
    server = make_server(settings=settings)
    assert web.get(f"{server.url}/healthy").status_code == 200
    assert post(server, "/v1/predict", {"instances": [GENERATE]}).status_code == 401
    with_key = web.post(
        f"{server.url}/v1/predict", json={"instances": [GENERATE]}, headers={"authorization": "Bearer key"}
    )
    assert len(with_key.json()["predictions"]) == 1


def test_strictly_an_instance_is_sampled_and_little_of_it_is_read(make_server):
    server = make_server(settings=ServerSettings(tgi_strict=True))
    instance = {"inputs": "abc", "parameters": {"max_new_tokens": 6, "seed": 3, "do_sample": False, "top_p": 7}}
    first, again = (post(server, "/vertex", {"instances": [instance]}).json()["predictions"] for _ in range(2))
    assert first == again
    drawn = post(
        server, "/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 6, "seed": 3, "do_sample": True}}
    )
    assert first == [drawn.json()["generated_text"]]


def infer(text: bytes, **more: object) -> dict:
    given = {"name": "in", "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)}
    return {"id": "7", "inputs": [given], "outputs": [{"name": "out"}], "parameters": {"max_new_tokens": 6}} | more


def test_bytes_in_bytes_out(server):
    answer = post(server, f"{MODEL}/infer", infer(b"abc")).json()
    text = server.expected_text(ids(server, "abc"), 6).encode()
    assert answer == {
        "id": "7",
        "outputs": [{"name": "out", "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)}],
    }


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (infer(b"\xff"), 422, "inputs[0].data is no UTF-8"),
        (infer(b"a", outputs=[]), 422, "inputs has 1 and outputs 0"),
        (infer(b"a", inputs=[]), 422, "the number of inputs is 0"),
        (infer(b"a") | {"inputs": [infer(b"a")["inputs"][0] | {"data": [-1]}]}, 422, "inputs[0].data is no UTF-8"),
        (infer(b"a") | {"inputs": [infer(b"a")["inputs"][0] | {"datatype": "FP32"}]}, 422, "datatype is 'FP32'"),
        (infer(b"a", parameters={"top_k": -4}), 422, "top_k is -4"),
    ],
)
def test_bytes_that_cannot_be_are_refused(server, body, status, message):
    answer = post(server, f"{MODEL}/infer", body)
    assert answer.status_code == status
    assert message in answer.json()["error"]


def test_the_server_and_its_model_are_described(server):
    assert web.get(f"{server.url}/v2").json()["name"] == "quire"
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready"):
        assert web.get(server.url + path).json() == {"live": True}
    assert web.get(server.url + MODEL).json() == {"name": "fake", "version": "1", "extensions": ["infer", "ready"]}
    assert web.get(f"{server.url}/v2/models/other/versions/1").status_code == 404
    assert web.post(server.url + MODEL).status_code == 405


def test_these_routes_tell_their_timings_too(server):
    headers = {"x-quire-timings": "true"}
    for path, body in (("/vertex", {"instances": [GENERATE, CHAT]}), (f"{MODEL}/infer", infer(b"abc"))):
        answer = web.post(server.url + path, json=body, headers=headers).json()
        assert answer["timings"]["decode_steps"] == 5


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/vertex", {"instances": [{"inputs": "a", "parameters": {"details": True}}]}, "parameters.details is True"),
        ("/vertex", {"instances": [{"inputs": "a", "parameters": {"top_n_tokens": 2}}]}, "parameters.top_n_tokens"),
        ("/vertex", {"instances": [CHAT | {"logprobs": True}]}, "instances[0]: logprobs is true"),
        ("/vertex", {"instances": [CHAT | {"return_token_ids": True}]}, "instances[0]: return_token_ids is true"),
        (f"{MODEL}/infer", infer(b"a", parameters={"decoder_input_details": True}), "decoder_input_details is True"),
    ],
)
def test_what_an_answer_of_texts_has_no_place_for_is_refused(server, path, body, message):
    answer = post(server, path, body)
    assert answer.status_code == 422
    assert message in answer.json()["error"]


def test_fields_that_were_dropped_are_used(server):
    full = infer(b"abc", parameters={"max_new_tokens": 6, "return_full_text": True})
    data = post(server, f"{MODEL}/infer", full).json()["outputs"][0]["data"]
    assert bytes(data).decode() == "abc" + server.expected_text(ids(server, "abc"), 6)
    for instance in (GENERATE, CHAT):
        answer = post(server, "/vertex", {"instances": [GENERATE, instance | {"timings": True}]})
        assert answer.json()["timings"]["generated_tokens"] == 12


def test_fields_that_nothing_knows_are_named_wherever_they_stand(server, make_server):
    body = infer(b"a")
    body["inputs"][0]["dtype"] = "x"
    body["outputs"][0]["parameters"] = {}
    vertex = {"instances": [GENERATE, GENERATE | {"input": "x"}]}
    ignored = "x-quire-ignored-fields"
    assert post(server, f"{MODEL}/infer", body).headers[ignored] == "inputs[0].dtype,outputs[0].parameters"
    assert post(server, "/vertex", vertex).headers[ignored] == "instances[1].input"
    strict = make_server(settings=ServerSettings(strict=True))
    assert "inputs[0].dtype is not a field" in post(strict, f"{MODEL}/infer", body).json()["error"]
    assert "instances[1]: input is not a field" in post(strict, "/vertex", vertex).json()["error"]
