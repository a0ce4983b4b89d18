"""sglang-router and vllm-router before two servers, with the flags that docs/operations/routers.md has."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import web
from tests.chaos.server import wait_until

SLOW = {"step_s": 0.02}
LONG = {"prompt": "zz", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
OPENINGS = [chr(ord("a") + number) * 7 + f" {number * 7919} talk" * 15 for number in range(8)]


def texts(lines) -> list[str]:
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events[:-1]]


def test_conversations_are_spread_and_go_on_where_they_began(start):
    fleet = start(engine=SLOW)
    with ThreadPoolExecutor(len(OPENINGS)) as pool:
        first = list(pool.map(lambda text: fleet.ask({"prompt": text, "max_tokens": 20}), OPENINGS))
    assert [answer.status_code for answer in first] == [200] * len(OPENINGS)
    assert min(fleet.counts()) > 0
    for opening in OPENINGS:
        usage = fleet.ask({"prompt": f"{opening} and on", "max_tokens": 4}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]


def test_a_refusal_of_full_servers_passes_with_its_time_to_retry_and_closes_no_way(start):
    fleet = start(engine={"step_s": 0.5}, settings={"max_concurrent_requests": 1})
    with contextlib.ExitStack() as held:
        for server in fleet.servers:
            held.enter_context(web.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}))
        for _ in range(2):  # the router asks six times for each
            refused = fleet.ask({"prompt": "abc", "max_tokens": 4})
            assert refused.status_code == 429, refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
    for server in fleet.servers:
        server.wait_until_idle()
    assert fleet.ask({"prompt": "abc", "max_tokens": 4}).status_code == 200


def test_wrong_names_of_models_close_no_way(start):
    fleet = start()
    assert {fleet.ask({"model": "other", "prompt": "abc"}).status_code for _ in range(24)} == {404}
    assert fleet.ask({"prompt": "abc"}).status_code == 200


def test_requests_go_on_when_a_server_is_killed(start):
    fleet = start()
    assert fleet.ask({"prompt": "abc", "max_tokens": 4}).status_code == 200
    used = fleet.busier()
    used.process.kill()
    used.process.wait()
    answers = [fleet.ask({"prompt": "abc" + "de"[number % 2], "max_tokens": 4}) for number in range(8)]
    assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]


def test_streams_end_and_new_requests_are_answered_while_a_server_is_drained(start):
    fleet = start(engine=SLOW)
    whole = fleet.ask(LONG).json()["choices"][0]["text"]
    with web.stream("POST", f"{fleet.url}/v1/completions", json=LONG | {"model": "fake", "stream": True}) as answer:
        lines = answer.iter_lines()
        begun = next(lines)
        used = fleet.busier()
        used.process.terminate()
        answers = [fleet.ask({"prompt": "zz" + "ab"[number % 2], "max_tokens": 4}) for number in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
        assert "".join(texts([begun, *lines])) == whole
    assert used.process.wait() == 0


def test_tokens_are_streamed_as_they_are_generated(start):
    fleet = start(engine=SLOW)
    body = LONG | {"model": "fake", "stream": True}
    with web.stream("POST", f"{fleet.url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        begun = next(lines)
        wait_until(lambda: sum(one.metrics()["tgi_batch_current_size"] for one in fleet.servers) == 1)
        assert len(texts([begun, *lines])) > 100


def test_prompts_of_token_ids_pass_or_are_refused_by_the_router_itself(start, router):
    fleet = start()
    answer = fleet.ask({"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True})
    if router.name == "sglang-router":  # 0.3.2 knows texts only
        assert answer.status_code == 422
        assert sum(fleet.counts()) == 0
    else:
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["prompt_token_ids"] == [1, 2, 3]


def test_keys_pass_and_servers_are_found_without_them(start):
    fleet = start(settings={"api_key": "secret"})
    assert fleet.ask({"prompt": "abc"}).status_code == 401
    assert fleet.ask({"prompt": "abc"}, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert fleet.ask({"prompt": "abc"}, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_router_knows_the_model_by_its_name(start):
    assert [card["id"] for card in web.get(f"{start().url}/v1/models").json()["data"]] == ["fake"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_nothing_that_a_router_adds_is_ignored(start, path):
    said = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"input": "hi"}
    answer = start().ask(said, path)
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-fields" not in answer.headers


def test_sglang_router_reads_the_load_of_servers(start, router):
    if router.name != "sglang-router":
        pytest.skip("vllm-router reads another form, which vLLM does not have either, and counts requests itself")
    fleet = start("--policy", "power_of_two", guided=False, engine=SLOW)

    def loads() -> list[int]:
        return [one["load"] for one in web.get(f"{fleet.url}/get_loads").json()["workers"]]

    wait_until(lambda: loads() == [0, 0])
    asked = LONG | {"stream": True, "max_tokens": 400}
    with web.stream("POST", f"{fleet.servers[0].url}/v1/completions", json=asked):
        wait_until(lambda: max(loads()) > 0)
