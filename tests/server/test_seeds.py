"""The seeds of requests that name none."""

import os
import signal
from typing import Any

import pytest

from quire.errors import InvalidSetting
from quire.seeds import Seeds
from quire.server.settings import ServerSettings
from tests import web
from tests.server.processes import Served, wait_until
from tests.server.running import RunningServer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
RUN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 6}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 6}),
    ("/v1/completions", {"prompt": ["abc", "abd"], "max_tokens": 6, "n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/v1/messages", CHAT | {"model": "fake"}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 6, "store": False}),
    ("/generate", {"inputs": "abc", "parameters": {"do_sample": True, "max_new_tokens": 6}}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 6}),
]
REFUSED = ("/v1/completions", {"prompt": "abc", "max_tokens": 10_000})
SEEDED = ("/v1/completions", {"prompt": "abc", "max_tokens": 6, "seed": 3})
SAMPLED = {"inputs": "abc", "parameters": {"do_sample": True, "details": True, "max_new_tokens": 2}}


def texts_of(found: Any) -> list[str]:
    """All texts of an answer, without its ids and times."""
    if isinstance(found, dict):
        own = [found[key] for key in ("text", "content", "generated_text") if isinstance(found.get(key), str)]
        return own + [text for value in found.values() for text in texts_of(value)]
    return [text for value in found for text in texts_of(value)] if isinstance(found, list) else []


def run(server: RunningServer, requests: list[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    answers = [web.post(server.url + path, json=body) for path, body in requests]
    return [texts_of(answer.json()) for answer in answers if answer.status_code == 200]


def seed_of(url: str) -> int:
    """The seed that a request got."""
    return web.post(f"{url}/generate", json=SAMPLED).json()["details"]["seed"]


def expected(count: int) -> list[int]:
    seeds = Seeds(894)
    return [seeds.draw() for _ in range(count)]


def test_with_a_seed_of_the_server_the_same_run_has_the_same_answers(make_server):
    answers = run(make_server(settings=ServerSettings(seed=894)), RUN)
    assert len(answers) == len(RUN)
    assert all(texts and all(texts) for texts in answers)
    assert run(make_server(settings=ServerSettings(seed=894)), RUN) == answers
    assert run(make_server(settings=ServerSettings(seed=895)), RUN) != answers
    assert answers[0] != answers[1]
    assert len(set(answers[2])) == 4  # of two prompts, and two samples of each


def test_without_one_no_two_runs_are_alike(make_server):
    assert run(make_server(), RUN) != run(make_server(), RUN)


def test_requests_that_are_refused_or_have_a_seed_take_none(make_server):
    answers = run(make_server(settings=ServerSettings(seed=894)), RUN)
    between = [one for asked in RUN for one in (asked, REFUSED, SEEDED)]
    found = run(make_server(settings=ServerSettings(seed=894)), between)
    assert found[::2] == answers
    assert len({str(texts) for texts in found[1::2]}) == 1


def test_all_workers_count_together_and_one_that_is_replaced_goes_on(model_folder):
    served = Served(model_folder, "http_workers=2", "seed=894").wait()
    try:
        seeds = [seed_of(served.url) for _ in range(8)]  # each on a connection of its own, which either may accept
        for worker in served.named("quire-http"):
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: len(served.named("quire-http")) == 2)
        seeds += [seed_of(served.url) for _ in range(4)]
        assert seeds == expected(12)
    finally:
        served.stop()


@pytest.mark.parametrize("seed", [2**63, -(2**63)])
def test_a_seed_of_the_server_has_limits(seed):
    with pytest.raises(InvalidSetting, match=f"seed is {seed}; it must be between -92233"):
        ServerSettings(seed=seed)
