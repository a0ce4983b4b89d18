"""The `timings` of requests."""

import json
import threading
import time

import httpx
import pytest

from tests import web
from tests.patience import WAIT_S
from tests.server.gate import Gate

CHAT = {"messages": [{"role": "user", "content": "ledger"}], "max_tokens": 5}
ASKED = [
    ("/v1/completions", {"prompt": "ledger", "max_tokens": 5}),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", CHAT),
    ("/generate", {"inputs": "ledger", "parameters": {"max_new_tokens": 5}}),
    ("/", {"inputs": "ledger", "parameters": {"max_new_tokens": 5}}),
]


def found(answer: httpx.Response) -> dict:
    """The ledger in a whole answer, or in the last event of a stream."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data:").strip() for line in answer.text.split("\n") if line.startswith("data:")]
        events = [json.loads(line) for line in lines if line not in ("[DONE]", '{"type":"message_stop"}')]
        assert not any("timings" in event for event in events[:-1])
        return events[-1]["timings"]
    body = answer.json()
    return (body[0] if isinstance(body, list) else body)["timings"]


@pytest.mark.parametrize(("path", "body"), [*ASKED, ("/generate_stream", ASKED[-1][1])])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["field", "header"])
def test_a_ledger_is_given_on_demand_by_every_route(server, path, body, stream, by):
    if stream and path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/"):
        body = body | {"stream": True}
    plain = web.post(server.url + path, json=body)
    assert "timings" not in plain.text
    if by == "field":
        answer = web.post(server.url + path, json=body | {"timings": True})
    else:
        answer = web.post(server.url + path, json=body, headers={"x-quire-timings": "true"})
    ledger = found(answer)
    assert ledger["generated_tokens"] == 5
    assert ledger["decode_steps"] == 4
    assert ledger["preemptions"] == 0
    assert ledger["prefill_tokens"] == ledger["prompt_tokens"] - ledger["cached_tokens"]
    assert ledger["prefill_chunks"] == 1
    parts = ("validation_s", "tokenising_s", "queue_s", "prefill_s", "decode_s")
    assert sum(ledger[part] for part in parts) == pytest.approx(ledger["total_s"])
    assert all(ledger[part] >= 0 for part in parts)
    assert sum(ledger["blocked_s"].values()) == pytest.approx(ledger["queue_s"])


def test_a_request_that_waits_learns_for_what(make_server):
    """The first one has 200 steps, and none of them ends before the second one is there."""

    def slow_step(*_: object) -> None:
        is_second_there.wait(WAIT_S)
        time.sleep(0.005)

    is_second_there = threading.Event()
    server = make_server(max_batch_size=1, before_result=slow_step)
    first = threading.Thread(
        target=lambda: web.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 200})
    )
    first.start()
    server.wait_until(lambda: server.driver.engine.scheduler.num_running == 1)
    answers = []
    second = threading.Thread(
        target=lambda: answers.append(web.post(f"{server.url}/v1/chat/completions", json=CHAT | {"timings": True}))
    )
    second.start()
    server.wait_until(lambda: server.service.num_streams == 2)
    is_second_there.set()
    first.join()
    second.join()
    ledger = found(answers[0])
    assert ledger["blocked_s"]["slots"] > 0.5 * ledger["queue_s"] > 0


def test_a_request_that_was_preempted_learns_so(make_server):
    gate = Gate()  # both prompts are there before either has much of its answer
    server = make_server(num_pages=18, page_size=4, max_sequence_tokens=64, prefix_caching=False, before_result=gate)
    body = {"prompt": ["a" * 8, "b" * 8], "max_tokens": 50, "timings": True}
    answers = []
    asking = threading.Thread(target=lambda: answers.append(web.post(f"{server.url}/v1/completions", json=body)))
    asking.start()
    try:
        server.wait_until(lambda: len(server.service.engines.prompts) == 2)
        gate.step_until(lambda: server.driver.engine.scheduler.num_requests == 2)
    finally:
        gate.open()
    asking.join()
    ledger = found(answers[0])
    assert ledger["preemptions"] == server.driver.engine.scheduler.counters.preemptions > 0
    assert ledger["prefill_tokens"] > ledger["prompt_tokens"]


def test_an_answer_that_a_stop_string_ends_has_its_ledger_too(server):
    text = web.post(f"{server.url}/v1/completions", json={"prompt": "stop", "max_tokens": 30, "temperature": 0})
    stop = text.json()["choices"][0]["text"][10:13]
    body = {"prompt": "stop", "max_tokens": 30, "temperature": 0, "stop": stop, "timings": True}
    ledger = found(web.post(f"{server.url}/v1/completions", json=body))
    assert ledger["prefill_chunks"] == 1
    assert ledger["generated_tokens"] < 30


def test_processes_tell_it_too(served):
    ledger = found(served.ask({"prompt": "ledger", "max_tokens": 5, "timings": True}))
    assert (ledger["prefill_chunks"], ledger["generated_tokens"], ledger["decode_steps"]) == (1, 5, 4)
    assert ledger["tokens_per_s"] is None or ledger["tokens_per_s"] > 0  # None: all tokens came at once
