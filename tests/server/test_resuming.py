"""A front end keeps its requests when an engine ends, and resubmits them to the next one."""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.engine.port import Port
from quire.ipc.messages import AllResumed, Command, Submit
from quire.server.settings import ServerSettings
from tests import web
from tests.patience import WAIT_S
from tests.server.running import RunningServer, new_driver

LONG = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


class Pause:
    """Lets the first results of an engine through and keeps back the others, until its end."""

    def __init__(self, num_results: int = 12) -> None:
        self._left = num_results
        self.over = threading.Event()

    def __call__(self, *_: object) -> None:
        if self._left:
            self._left -= 1
        else:
            self.over.wait()


class Asking:
    """A request in the background."""

    def __init__(self, server: RunningServer, body: dict[str, Any], num_tokens: int = 6) -> None:
        """It has so many tokens then."""
        self._answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, body))
        self._thread.start()
        server.wait_until(lambda: any(one.num_tokens >= num_tokens for one in list(server.service._streams)))

    def _ask(self, server: RunningServer, body: dict[str, Any]) -> None:
        self._answer = web.post(f"{server.url}/v1/completions", json=body)

    def answer(self) -> httpx.Response:
        self._thread.join()
        assert self._answer is not None
        return self._answer


def in_loop(server: RunningServer, act: Callable[[], None]) -> None:
    done = threading.Event()
    server.loop.call_soon_threadsafe(lambda: (act(), done.set()))
    assert done.wait(WAIT_S)


def lose_engine(server: RunningServer, pause: Pause) -> None:
    """Without a word, as when its process is killed."""
    port = server.service.engines[0].port
    assert port is not None
    port.close()
    in_loop(server, lambda: server.service.engine_lost("the engine process has ended"))
    pause.over.set()
    server.wait_until(lambda: not server.driver._ports)
    server.driver.stop()


class Recorded:
    """A port that remembers what was sent."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self.request_id, self.close = port.request_id, port.close
        self.sent: list[Command] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)
        self._port.send(command)


def next_engine(server: RunningServer) -> list[Command]:
    """What it is sent. Its port has the number that the last one's had, as front ends have their own."""
    server.driver = new_driver()
    server.driver.start()
    port = Recorded(server.driver.open(server.service.deliver, number=1))
    in_loop(server, lambda: server.service.connect(port))
    return port.sent


def num_tokens(server: RunningServer) -> int:
    return max((stream.num_tokens for stream in list(server.service._streams)), default=0)


def ask(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    return web.post(f"{server.url}/v1/completions", json=body).json()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 5},
        {"n": 2, "temperature": 1, "seed": 6, "stop": "a"},
        {"logprobs": 2, "echo": True},
        {"min_tokens": 30, "stop_token_ids": [3, 4, 5]},
        {"min_tokens": 30, "stop": list("aeiou. ")},
        {"max_tokens": 1, "n": 2, "temperature": 1, "seed": 1},
    ],
    ids=str,
)
def test_the_answer_is_that_of_one_engine(make_server, server, fields):
    pause = Pause()
    disturbed = make_server(before_result=pause)
    body = {"prompt": LONG, "max_tokens": 60, "temperature": 0} | fields
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(disturbed, body)))
    asking.start()
    # A request for one token is answered by now, or waits for the next engine.
    disturbed.wait_until(lambda: fields.get("max_tokens") == 1 or num_tokens(disturbed) > 5)
    lose_engine(disturbed, pause)
    next_engine(disturbed)
    asking.join()
    right = ask(server, body)
    assert answers[0]["choices"] == right["choices"]
    assert answers[0]["usage"]["completion_tokens"] == right["usage"]["completion_tokens"]


def test_what_was_cached_is_told_as_the_first_engine_found_it(make_server):
    pause = Pause()
    server = make_server(before_result=pause)
    body = {"prompt": LONG, "max_tokens": 40, "temperature": 0}
    web.post(f"{server.url}/v1/completions", json=body | {"max_tokens": 1})
    asking = Asking(server, body)
    lose_engine(server, pause)
    next_engine(server)
    assert asking.answer().json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 11


def test_timings_are_of_all_engines(make_server):
    pause = Pause()
    server = make_server(before_result=pause)
    asking = Asking(server, {"prompt": LONG, "max_tokens": 40, "timings": True})
    lose_engine(server, pause)
    time.sleep(0.3)  # which counts
    next_engine(server)
    ledger = asking.answer().json()["timings"]
    assert ledger["engine_restarts"] == 1
    assert ledger["prefill_chunks"] == 2
    assert ledger["prefill_tokens"] > 2 * len(LONG) + 5  # the prompt, and with more than 5 tokens after it once more
    assert ledger["generated_tokens"] == 40
    assert ledger["decode_s"] > 0.3
    parts = ("validation_s", "tokenising_s", "queue_s", "prefill_s", "decode_s")
    assert sum(ledger[part] for part in parts) == pytest.approx(ledger["total_s"])
    assert sum(ledger["blocked_s"].values()) == pytest.approx(ledger["queue_s"])


def test_a_request_has_one_time_limit_over_all_engines(make_server):
    pause, limit_s = Pause(), 1000.0
    server = make_server(before_result=pause, settings=ServerSettings(request_timeout_s=limit_s))
    asking = Asking(server, {"prompt": LONG, "max_tokens": 400})
    begun = time.monotonic()
    time.sleep(0.1)
    lose_engine(server, pause)
    spent_s = time.monotonic() - begun
    asked, last = next_engine(server)
    assert last == AllResumed()  # so that the engine waits for no more
    assert isinstance(asked, Submit)
    assert asked.request.timeout_s == limit_s
    assert spent_s <= asked.waited_s < limit_s
    assert asking.answer().status_code == 200


def test_a_time_limit_holds_while_there_is_no_engine(make_server):
    server = make_server(settings=ServerSettings(request_timeout_s=0.2))
    pause = Pause()
    lose_engine(server, pause)
    asking = Asking(server, {"prompt": LONG, "max_tokens": 400}, num_tokens=0)
    in_loop(server, server.service.expire)
    time.sleep(0.2)
    in_loop(server, server.service.expire)
    assert asking.answer().status_code == 504


def test_the_time_without_a_slot_has_a_limit_while_there_is_no_engine(make_server):
    server = make_server(settings=ServerSettings(queue_timeout_s=0.2))
    lose_engine(server, Pause())
    asking = Asking(server, {"prompt": LONG, "max_tokens": 400}, num_tokens=0)
    in_loop(server, server.service.expire)
    time.sleep(0.2)
    in_loop(server, server.service.expire)
    answer = asking.answer()
    assert answer.status_code == 504
    assert "--queue-timeout-s" in answer.text


@pytest.mark.parametrize("num_results", [1, 12])  # a part of the prompt; tokens
def test_a_request_that_had_a_slot_waits_for_another_engine_for_any_time(make_server, num_results):
    pause = Pause(num_results)
    server = make_server(
        before_result=pause, settings=ServerSettings(queue_timeout_s=1000.0), max_batch_prefill_tokens=4
    )
    asking = Asking(server, {"prompt": LONG, "max_tokens": 400}, num_tokens=6 if num_results == 12 else 0)
    (prompt,) = next(iter(server.service._streams)).prompts
    server.wait_until(lambda: prompt.has_started)
    lose_engine(server, pause)
    asked, _ = next_engine(server)
    assert isinstance(asked, Submit)
    assert asked.request.queue_timeout_s is None
    assert asking.answer().status_code == 200


def test_keys_share_cached_pages_unless_they_are_kept_apart(make_server):
    def cached(server: RunningServer, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": LONG, "max_tokens": 1}
        usage = web.post(f"{server.url}/v1/completions", json=body, headers=headers).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    together = make_server(settings=ServerSettings(api_key="one,two"))
    assert [cached(together, key) for key in ("one", "two", "one")] == [0, 11, 11]
    apart = make_server(settings=ServerSettings(api_key="one,two", isolate_api_keys=True))
    assert [cached(apart, key) for key in ("one", "two", "one", "two")] == [0, 0, 11, 11]
