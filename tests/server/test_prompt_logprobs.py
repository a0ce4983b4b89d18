"""Log-probabilities of prompts that are computed in several steps, each of which brings some of them and no token."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.request import Request
from tests import web
from tests.fake_executor import expected_prompt_logprobs
from tests.server.running import WAIT_S, RunningServer

PROMPT = [token % 40 + 1 for token in range(100)]
CHUNK = 16  # tokens of a prompt that a step computes


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A step ends when the event loop has seen the one before it, so that each is heard of alone."""

    async def turn() -> None:
        await asyncio.sleep(0)

    def wait_for_the_loop(plan: object, prompts: object) -> None:
        asyncio.run_coroutine_threadsafe(turn(), running.loop).result(WAIT_S)

    running = RunningServer(max_batch_prefill_tokens=CHUNK, before_result=wait_for_the_loop).start()
    yield running
    running.stop()


@pytest.fixture
def scores() -> list[float]:
    found = expected_prompt_logprobs(Request(0, tuple(PROMPT), 1, prompt_logprobs=0))
    return [each.logprob for each in found]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data:").strip() for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_completions_echo_a_long_prompt_with_its_logprobs(server, scores, stream, max_tokens):
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "stream": stream}
    answer = web.post(f"{server.url}/v1/completions", json=body | {"temperature": 0})
    assert answer.status_code == 200
    parts = events(answer) if stream else [answer.json()]
    scored = [part["choices"][0]["logprobs"] for part in parts]  # none where an event only says why it ends
    told = [score for each in scored if each is not None for score in each["token_logprobs"]]
    assert told[0] is None
    assert told[1 : len(PROMPT)] == pytest.approx(scores)
    assert len(told) == len(PROMPT) + max_tokens
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert text == server.model.tokenizer.decode([*PROMPT, *server.expected(PROMPT, max_tokens)])


def test_several_long_prompts_are_echoed_together(server, scores):
    body = {"model": "fake", "prompt": [PROMPT, PROMPT[::-1]], "max_tokens": 2, "echo": True, "logprobs": 0}
    answer = web.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200
    first, second = answer.json()["choices"]
    assert first["logprobs"]["token_logprobs"][1 : len(PROMPT)] == pytest.approx(scores)
    assert len(second["logprobs"]["token_logprobs"]) == len(PROMPT) + 2


@pytest.mark.parametrize("best_of", [None, 2])
def test_generate_tells_the_logprobs_of_a_long_prompt(server, scores, best_of):
    text = server.model.tokenizer.decode(PROMPT)
    parameters = {"max_new_tokens": 3, "decoder_input_details": True, "details": True}
    if best_of is not None:
        parameters |= {"best_of": best_of, "do_sample": True}
    answer = web.post(f"{server.url}/generate", json={"inputs": text, "parameters": parameters})
    assert answer.status_code == 200
    details = answer.json()["details"]
    assert [token["id"] for token in details["prefill"]] == PROMPT
    assert [token["logprob"] for token in details["prefill"]][1:] == pytest.approx(scores)
    assert len(details["tokens"]) == 3


def test_a_stream_of_tokens_refuses_the_logprobs_of_its_prompt(server):
    body = {"inputs": "abc", "parameters": {"decoder_input_details": True}}
    answer = web.post(f"{server.url}/generate_stream", json=body)
    assert answer.status_code == 422
    assert "decoder_input_details is true; it cannot be streamed" in answer.json()["error"]
