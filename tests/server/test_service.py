"""Leaving, waiting, overload, failure: what happens to requests besides being answered."""

import asyncio
import json
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest

from quire.server.settings import ServerSettings
from quire.text.chat import ChatTemplate, ChatTemplates
from tests import web
from tests.fake_executor import NAN
from tests.patience import WAIT_S
from tests.server.gate import Gate
from tests.server.running import RunningServer
from tests.server.vocabulary import PIECES, served_model

LONG = {"prompt": "abc", "max_tokens": 500, "temperature": 0}


def send_raw(server: RunningServer, path: str, body: object) -> socket.socket:
    """A request on a bare socket, which can be left in any state."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open()


def num_requests(server: RunningServer) -> int:
    return server.driver.engine.scheduler.num_requests


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(make_server, gate, stream):
    server = make_server(before_result=gate)
    connection = send_raw(server, "/v1/completions", LONG | {"stream": stream})
    server.wait_until(lambda: num_requests(server) == 1)
    gate.let(4)
    if stream:
        connection.recv(10)
    connection.close()
    server.wait_until(lambda: server.service.metrics.failures["dropped"] == 1)
    assert server.service.num_streams == 0
    gate.let(2)  # the step that was under way, and the one planned behind it
    server.wait_until(lambda: num_requests(server) == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits_is_taken_off_the_queue(make_server, gate, stream):
    server = make_server(before_result=gate, max_batch_size=1)
    running = send_raw(server, "/v1/completions", LONG)
    server.wait_until(lambda: server.driver.engine.scheduler.num_running == 1)
    waiting = send_raw(server, "/v1/completions", LONG | {"stream": stream})
    server.wait_until(lambda: server.service.num_streams == 2)
    gate.step_until(lambda: server.driver.engine.scheduler.num_waiting == 1)
    waiting.close()
    server.wait_until(lambda: server.service.num_streams == 1)
    gate.step_until(lambda: num_requests(server) == 1)
    running.close()


def test_a_client_that_does_not_read_slows_no_other_and_is_bounded(make_server):
    # Chunks repeat the model's name, so with a long one few of them fill every buffer on the way.
    model = replace(served_model(), name="m" * 8000)
    server = make_server(settings=ServerSettings(max_buffered_tokens=200), model=model, max_batch_size=17)
    slow = send_raw(server, "/v1/completions", LONG | {"stream": True, "n": 16})
    server.wait_until(lambda: server.service.metrics.numbers["tgi_request_count"] == 1)
    answer = web.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 50}).json()
    assert answer["usage"]["completion_tokens"] == 50
    server.wait_until(lambda: server.service.metrics.failures["overloaded"] == 1)
    server.wait_until(lambda: num_requests(server) == 0)
    slow.close()


def test_more_requests_than_may_be_open_are_refused_with_a_time(make_server, gate):
    server = make_server(before_result=gate, settings=ServerSettings(max_concurrent_requests=1))
    first = send_raw(server, "/v1/completions", LONG)
    server.wait_until(lambda: server.service.num_streams == 1)
    for path, body in (("/v1/completions", LONG), ("/generate", {"inputs": "abc"})):
        refused = web.post(server.url + path, json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error_type"] == "overloaded"
    first.close()


def test_a_client_that_retries_on_time_has_a_place_among_the_open_requests(make_server):
    """Although others, who were told the same, do not stop asking."""
    settings = ServerSettings(max_concurrent_requests=32)
    server = make_server(before_result=lambda *_: time.sleep(0.01), settings=settings, max_batch_size=32)

    async def ask(client: httpx.AsyncClient, number: int) -> httpx.Response:
        asked = {
            "prompt": [1 + number % 40, 1 + number // 40],
            "max_tokens": 30,
        }  # they end within the time for which places are kept
        return await client.post("/v1/completions", json=asked)

    async def press(client: httpx.AsyncClient, number: int) -> None:
        while True:
            await ask(client, number)
            await asyncio.sleep(0.1)

    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as client:
            crowd = [asyncio.create_task(press(client, number)) for number in range(38)]
            refused: dict[int, httpx.Response] = {}
            async with asyncio.timeout(WAIT_S):
                while not refused:  # until the crowd has every place
                    answers = await asyncio.gather(*(ask(client, 100 + number) for number in range(3)))
                    refused = {number: answer for number, answer in enumerate(answers) if answer.status_code == 429}

            async def come_back(number: int) -> int:
                await asyncio.sleep(int(refused[number].headers["retry-after"]))
                return (await ask(client, 100 + number)).status_code

            statuses = await asyncio.gather(*map(come_back, refused))
            for one in crowd:
                one.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
            return statuses

    assert set(asyncio.run(run())) == {200}


def test_a_full_queue_is_a_429_also_for_streams(make_server, gate):
    server = make_server(before_result=gate, max_batch_size=1, max_queued=1)
    others = [send_raw(server, "/v1/completions", LONG)]
    server.wait_until(lambda: server.driver.engine.scheduler.num_running == 1)
    others.append(send_raw(server, "/v1/completions", LONG))
    server.wait_until(lambda: server.service.num_streams == 2)
    gate.step_until(lambda: server.driver.engine.scheduler.num_waiting == 1)
    refused = []
    asking = threading.Thread(
        target=lambda: refused.append(web.post(f"{server.url}/v1/completions", json=LONG | {"stream": True}))
    )
    asking.start()
    server.wait_until(lambda: server.service.num_streams == 3 or not asking.is_alive())
    gate.step_until(lambda: not asking.is_alive())
    assert refused[0].status_code == 429
    assert "the queue takes 1" in refused[0].json()["error"]["message"]
    assert int(refused[0].headers["retry-after"]) >= 1
    for connection in others:
        connection.close()


def test_tokens_that_the_tokenizer_does_not_know_are_answered_with_their_scores(make_server):
    """Models have more rows than there are tokens, and nothing keeps them from being sampled."""
    server = make_server(model=served_model(pieces=PIECES[:12]))
    asked = {"prompt": "abc", "max_tokens": 30, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 30}
    for path, body in (
        ("/v1/completions", asked | {"logprobs": 3}),
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 3}),
        ("/generate", {"inputs": "abc", "parameters": {"max_new_tokens": 30, "details": True, "top_n_tokens": 3}}),
    ):
        for stream in ({}, {"stream": True}) if path != "/generate" else ({},):
            answer = web.post(server.url + path, json=body | stream)
            assert answer.status_code == 200, answer.text
            assert '"error"' not in answer.text
    scores = web.post(f"{server.url}/v1/completions", json=asked | {"logprobs": 3}).json()["choices"][0]["logprobs"]
    assert any(token.startswith("token_id:") for token in scores["tokens"])


def test_a_request_whose_row_fails_fails_alone(server):
    poisoned = {"prompt": [1, NAN, 2], "max_tokens": 5}
    answer = web.post(f"{server.url}/v1/completions", json=poisoned)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    text = {"inputs": f"a{PIECES[NAN]}b", "parameters": {"max_new_tokens": 5}}
    answer = web.post(f"{server.url}/generate", json=text)
    assert (answer.status_code, answer.json()["error_type"]) == (424, "generation")


def failures_counted(server: RunningServer, err: str) -> str:
    lines = web.get(f"{server.url}/metrics").text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines)[f'tgi_request_failure{{err="{err}"}}']


def test_when_the_engine_fails_every_request_with_it_gets_a_generation_error(make_server, gate):
    """Of text-generation-inference's routes, whose clients know that type: whole answers, streams, and what comes
    later."""
    server = make_server(before_result=gate)
    asked = {"inputs": "abc", "parameters": {"max_new_tokens": 400}}
    answers = []
    asking = [
        threading.Thread(target=lambda path=path: answers.append(web.post(server.url + path, json=asked)))
        for path in ("/generate", "/generate", "/generate_stream")
    ]
    for one in asking:
        one.start()
    server.wait_until(lambda: server.service.num_streams == 3)
    gate.step_until(lambda: all(one.times.first_s for one in list(server.service._streams)))
    server.loop.call_soon_threadsafe(server.service.disconnect, "the engine process ended")
    for one in asking:
        one.join(WAIT_S)
    assert sorted(answer.status_code for answer in answers) == [200, 424, 424]
    assert all('"error":"the engine process ended","error_type":"generation"' in one.text for one in answers)
    late = web.post(f"{server.url}/generate", json=asked)
    assert (late.status_code, late.json()["error_type"]) == (424, "generation")
    assert failures_counted(server, "generation") == "4"
    assert failures_counted(server, "incomplete") == "0"


def test_a_generation_error_that_passes_has_the_status_and_the_time_to_try_again(make_server):
    server = make_server(settings=ServerSettings(wait_for_restart=False))
    server.loop.call_soon_threadsafe(server.service.engine_lost, "the engine process has ended")
    server.wait_until(lambda: server.service.why_not_ready is not None)
    refused = web.post(f"{server.url}/generate", json={"inputs": "abc"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert refused.json()["error_type"] == "generation"


def test_a_failure_half_way_is_an_event_in_the_stream(make_server, gate):
    server = make_server(before_result=gate)
    gate.let(5)
    with web.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert "choices" in next(lines)
        server.loop.call_soon_threadsafe(server.service.disconnect, "the engine process ended")
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == "the engine process ended"
    refused = web.post(f"{server.url}/v1/completions", json=LONG)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable_error")
    ready = web.get(f"{server.url}/health")
    assert (ready.status_code, ready.json()["reason"]) == (503, "the engine process ended")
    assert ready.json()["error_type"] == "healthcheck"
    assert web.get(f"{server.url}/health/live").status_code == 503


def test_a_request_that_takes_too_long_ends_with_504(make_server):
    settings = ServerSettings(request_timeout_s=0.1)
    server = make_server(settings=settings, before_result=lambda *_: time.sleep(0.02))
    answer = web.post(f"{server.url}/v1/completions", json=LONG)
    assert answer.status_code == 504
    assert "the limit of 0.1 s, --request-timeout-s, passed" in answer.json()["error"]["message"]


def test_draining_finishes_what_runs_and_refuses_what_comes(make_server, gate):
    server = make_server(before_result=gate)
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(web.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 5}))
    )
    asking.start()
    server.wait_until(lambda: server.service.num_streams == 1)
    draining = asyncio.run_coroutine_threadsafe(server.service.drain(WAIT_S), server.loop)
    server.wait_until(lambda: server.service.is_draining)
    refused = web.post(f"{server.url}/v1/completions", json=LONG)
    assert (refused.status_code, "shutting down" in refused.text) == (503, True)
    gate.open()
    draining.result(WAIT_S)
    asking.join(WAIT_S)
    assert answers[0].json()["usage"]["completion_tokens"] == 5


def test_what_cannot_finish_in_time_is_told(make_server, gate):
    server = make_server(before_result=gate)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(web.post(f"{server.url}/v1/completions", json=LONG)))
    asking.start()
    server.wait_until(lambda: server.service.num_streams == 1)
    asyncio.run_coroutine_threadsafe(server.service.drain(0.05), server.loop).result(WAIT_S)
    asking.join(WAIT_S)
    assert (answers[0].status_code, "0.05 s were given" in answers[0].text) == (503, True)


def test_keys_open_the_door_and_nothing_else_does(make_server):
    server = make_server(settings=ServerSettings(api_key="first, sécond"))
    small = {"prompt": "abc", "max_tokens": 1}

    def ask(value: bytes | None) -> int:
        headers = {} if value is None else {b"authorization": value}
        return web.post(f"{server.url}/v1/completions", json=small, headers=headers).status_code

    assert [ask(key) for key in (b"Bearer first", "Bearer sécond".encode(), b"bearer first")] == [200] * 3
    assert [ask(key) for key in (None, b"", b"Bearer", b"Bearer FIRST", b"first", b"Basic first")] == [401] * 6
    assert web.get(f"{server.url}/health").status_code == 200
    refused = web.post(server.url, json={"inputs": "a"})
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    strict = make_server(settings=ServerSettings(api_key="first", tgi_strict=True))
    assert web.post(strict.url, json={"inputs": "a"}).headers["www-authenticate"] == "Bearer"


def test_browsers_of_the_named_origins_may_ask(make_server):
    server = make_server(settings=ServerSettings(cors_allow_origin=("https://one.example",), api_key="key"))

    def preflight(origin: str) -> httpx.Response:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        return web.options(f"{server.url}/v1/completions", headers=headers)

    assert preflight("https://one.example").headers["access-control-allow-origin"] == "https://one.example"
    assert "access-control-allow-origin" not in preflight("https://two.example").headers


def test_metrics_count_what_happened(make_server):
    server = make_server()
    web.post(f"{server.url}/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 7}})
    web.post(f"{server.url}/generate", json={"inputs": ""})
    text = web.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["tgi_request_count"] == "2"
    assert values["tgi_request_success"] == "1"
    assert values['tgi_request_failure{err="validation"}'] == "1"
    assert values["tgi_request_generated_tokens_sum"] == "7.0"
    assert values["tgi_request_input_length_count"] == "1"
    assert values['tgi_request_duration_bucket{le="+Inf"}'] == "1"
    assert values["quire_time_to_first_token_seconds_count"] == "1"
    assert values["quire_inter_token_seconds_count"] == "6"


def test_the_buckets_of_lengths_end_at_their_limits(make_server):
    server = make_server(model=replace(served_model(), max_input_tokens=100))
    lines = web.get(f"{server.url}/metrics").text.splitlines()
    for name, last in (("input_length", "100"), ("generated_tokens", "512"), ("max_new_tokens", "512")):
        buckets = [line for line in lines if line.startswith(f"tgi_request_{name}_bucket")]
        assert len(buckets) == 101
        assert f'le="{last}"' in buckets[-2]


def test_what_a_chat_template_refuses_is_counted_as_such(make_server):
    templates = ChatTemplates({"default": ChatTemplate("{{ raise_exception('no roles') }}")})
    server = make_server(model=replace(served_model(), templates=templates))
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    refused = web.post(f"{server.url}/v1/chat/completions", json=chat)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "template_error")
    native = web.post(f"{server.url}/chat_tokenize", json=chat)
    assert (native.status_code, native.json()["error_type"]) == (422, "template_error")
    text = web.get(f"{server.url}/metrics").text
    assert 'tgi_request_failure{err="template"} 1\n' in text
    assert 'tgi_request_failure{err="validation"} 0\n' in text


@pytest.mark.parametrize("max_burst", [1, 4])
def test_no_token_is_counted_as_skipped_without_speculation(make_server, max_burst):
    """A burst brings several tokens in one step, and computes each of them."""
    server = make_server(max_burst=max_burst)
    web.post(f"{server.url}/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 7}})
    text = web.get(f"{server.url}/metrics").text
    assert "tgi_request_skipped_tokens_count 7\n" in text
    assert "tgi_request_skipped_tokens_sum 0" in text


def test_the_time_to_turn_tokens_into_text_is_measured_by_step(make_server):
    server = make_server()
    web.post(f"{server.url}/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 7}})
    text = web.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["quire_detokenize_seconds_count"] == "7"
    assert 0 < float(values["quire_detokenize_seconds_sum"]) <= float(values["tgi_request_duration_sum"])
