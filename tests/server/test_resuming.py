"""What a front end remembers when its engine ends, and what it asks the next one for."""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.server.settings import ServerSettings
from tests.server.running import RunningServer, new_driver

LONG = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def slowly(*_: object) -> None:
    time.sleep(0.01)


class Asking:
    """A request in the background."""

    def __init__(self, server: RunningServer, body: dict[str, Any], **options: Any) -> None:
        self._answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, body, options))
        self._thread.start()
        server.wait_until(lambda: any(stream.num_tokens > 5 for stream in server.service._streams))

    def _ask(self, server: RunningServer, body: dict[str, Any], options: dict[str, Any]) -> None:
        self._answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20, **options)

    def answer(self) -> httpx.Response:
        self._thread.join()
        assert self._answer is not None
        return self._answer


def in_loop(server: RunningServer, act: Callable[[], None]) -> None:
    done = threading.Event()
    server.loop.call_soon_threadsafe(lambda: (act(), done.set()))
    assert done.wait(5)


def lose_engine(server: RunningServer) -> None:
    """Without a word, as when its process is killed."""
    port = server.service._port
    assert port is not None
    port.close()
    in_loop(server, lambda: server.service.lose("the engine process has ended"))
    server.wait_until(lambda: not server.driver._ports)
    server.driver.stop()


def next_engine(server: RunningServer) -> None:
    """Its port has the number that the last one's had, as front ends have their own."""
    server.driver = new_driver(slowly)
    server.driver.start()
    port = server.driver.open(server.service.deliver, number=1)
    in_loop(server, lambda: server.service.connect(port))


def ask(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).json()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 5},
        {"n": 2, "temperature": 1, "seed": 6, "stop": "a"},
        {"logprobs": 2, "echo": True},
        {"min_tokens": 30, "stop_token_ids": [3, 4, 5]},
        {"max_tokens": 1, "n": 2, "temperature": 1, "seed": 1},
    ],
    ids=str,
)
def test_the_answer_is_that_of_one_engine(make_server, server, fields):
    disturbed = make_server(before_result=slowly)
    body = {"prompt": LONG, "max_tokens": 60, "temperature": 0} | fields
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(disturbed, body)))
    asking.start()
    time.sleep(0.15)
    lose_engine(disturbed)
    next_engine(disturbed)
    asking.join()
    right = ask(server, body)
    assert answers[0]["choices"] == right["choices"]
    assert answers[0]["usage"]["completion_tokens"] == right["usage"]["completion_tokens"]


def test_what_was_cached_is_told_as_the_first_engine_found_it(make_server):
    server = make_server(before_result=slowly)
    body = {"prompt": LONG, "max_tokens": 40, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body | {"max_tokens": 1})
    asking = Asking(server, body)
    lose_engine(server)
    next_engine(server)
    assert asking.answer().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


def test_timings_are_of_all_engines(make_server):
    server = make_server(before_result=slowly)
    asking = Asking(server, {"prompt": LONG, "max_tokens": 40, "timings": True})
    lose_engine(server)
    time.sleep(0.3)
    next_engine(server)
    ledger = asking.answer().json()["timings"]
    assert ledger["engine_restarts"] == 1
    assert ledger["prefill_chunks"] == 2
    assert ledger["prefill_tokens"] > 2 * len(LONG) + 5  # the prompt, and with more than 5 tokens after it once more
    assert ledger["generated_tokens"] == 40
    assert ledger["decode_s"] > 0.3 + 30 * 0.01
    parts = ("validation_s", "tokenising_s", "queue_s", "prefill_s", "decode_s")
    assert sum(ledger[part] for part in parts) == pytest.approx(ledger["total_s"])
    assert sum(ledger["blocked_s"].values()) == pytest.approx(ledger["queue_s"])


def test_a_request_has_one_time_limit_over_all_engines(make_server):
    server = make_server(before_result=slowly, settings=ServerSettings(request_timeout_s=1.5))
    begun = time.monotonic()
    asking = Asking(server, {"prompt": LONG, "max_tokens": 400})
    time.sleep(max(0.0, begun + 1.0 - time.monotonic()))
    lose_engine(server)
    next_engine(server)
    assert asking.answer().status_code == 504
    assert 1.4 < time.monotonic() - begun < 2.4


def test_a_time_limit_holds_while_there_is_no_engine(make_server):
    server = make_server(before_result=slowly, settings=ServerSettings(request_timeout_s=0.5))
    asking = Asking(server, {"prompt": LONG, "max_tokens": 400})
    lose_engine(server)
    time.sleep(0.5)
    in_loop(server, server.service.expire)
    assert asking.answer().status_code == 504


def test_keys_share_cached_pages_unless_they_are_kept_apart(make_server):
    def cached(server: RunningServer, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": LONG, "max_tokens": 1}
        usage = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    together = make_server(settings=ServerSettings(api_key="one,two"))
    assert [cached(together, key) for key in ("one", "two", "one")] == [0, 8, 8]
    apart = make_server(settings=ServerSettings(api_key="one,two", isolate_api_keys=True))
    assert [cached(apart, key) for key in ("one", "two", "one", "two")] == [0, 0, 8, 8]
