"""Clients that mean harm, while others are served: everything is refused or served, and nobody else notices."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import web
from tests.chaos.asking import Asking, body, expected
from tests.chaos.clients import address, written
from tests.chaos.server import Server
from tests.patience import WAIT_S

MAX_GROWTH_BYTES = 64 * 2**20
STORM_S = 3.0  # in which a thousand come
MAX_ATTEMPTS = 4  # of those that come back as they were told


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()
    return int(fields[1]) * 4096


class Witness:
    """A client like any other, which asks one thing after the other and checks every answer."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self.num_answers = 0
        self.wrong: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with web.Client(base_url=self._server.url) as client:
            while not self._over.is_set() or not self.num_answers:
                asked = body(self.num_answers, max_tokens=20)
                try:
                    answer = client.post("/v1/completions", json=asked)
                    text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
                except httpx.HTTPError as error:
                    text = repr(error)
                self.num_answers += 1
                if [text] != expected(asked):
                    self.wrong.append((asked, text))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def server(fake_model: Path) -> Iterator[Server]:
    one = Server("fake", fake_model, engine={"step_s": 0.002}, settings={"max_buffered_tokens": 200}).wait()
    yield one
    one.stop()


@pytest.fixture(autouse=True)
def nobody_notices(server: Server) -> Iterator[None]:
    """While each test runs; and nothing is left of what it did."""
    pids = [*server.processes("quire-engine"), *server.processes("quire-http")]
    before = {pid: resident_bytes(pid) for pid in pids}
    witness = Witness(server)
    yield
    witness.stop()
    assert witness.num_answers
    assert not witness.wrong
    server.wait_until_idle()
    assert [*server.processes("quire-engine"), *server.processes("quire-http")] == pids, "a process was replaced"
    for pid in pids:
        assert resident_bytes(pid) - before[pid] < MAX_GROWTH_BYTES


async def leave(url: str, asked: bytes, chance: random.Random) -> bytes:
    """Ask, one in four times for less than a whole request, and be gone within a second, or as soon as the answer has
    begun. What had come by then."""
    # All chances are taken before the first wait, so in the same order on every machine.
    comes_after_s, stays_s = STORM_S * chance.random(), chance.random()
    is_whole, awaits_answer = bool(chance.randrange(4)), bool(chance.randrange(2))
    length = len(asked) if is_whole else chance.randrange(len(asked))
    await asyncio.sleep(comes_after_s)
    reader, writer = await asyncio.open_connection(*address(url))
    writer.write(asked[:length])
    heard = b""
    if is_whole and awaits_answer:
        heard = await reader.readuntil(b"data: {")
        writer.transport.abort()
        return heard
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(stays_s):
            while part := await reader.read(65536):
                heard += part
    writer.transport.abort()
    return heard


def test_a_thousand_clients_that_leave_at_random_moments(server):
    chance = random.Random(1)
    bodies = [body(number, max_tokens=200, n=1 + number % 3, stream=True) for number in range(1000)]

    async def run() -> list[bytes]:
        return await asyncio.gather(*(leave(server.url, written("/v1/completions", one), chance) for one in bodies))

    heard = asyncio.run(run())
    assert all(one.startswith(b"HTTP/1.1 200") for one in heard if one)
    assert sum(b"data: {" in one for one in heard) > 100, "hardly anybody was in the middle of an answer"
    assert sum(not one.endswith(b"data: [DONE]\n\n") for one in heard) > 500, "hardly anybody left"


def test_connections_that_never_ask_anything(server):
    half_open = [socket.create_connection(address(server.url)) for _ in range(200)]
    for one in half_open[::2]:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le")
    time.sleep(0.5)
    for one in half_open:
        one.close()


def test_readers_that_do_not_read(server):
    slow = [socket.create_connection(address(server.url)) for _ in range(8)]
    for number, one in enumerate(slow):
        asked = json.dumps(body(number, max_tokens=490, n=16, temperature=1, stream=True)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(asked)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.sendall(head + asked)
    time.sleep(2)
    for one in slow:
        one.close()


@pytest.mark.parametrize("flood", [b"x-%d: y\r\n", b"%d" + b"a" * 1000], ids=["many headers", "one long header"])
def test_a_flood_of_headers_is_cut_off(server, flood):
    with socket.create_connection(address(server.url)) as one:
        one.settimeout(WAIT_S)
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-first: ")
        try:
            for number in range(100_000):
                one.sendall(flood % number)
            answer = one.recv(4096)
        except OSError:  # it was closed while we wrote
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


BODIES = {
    "ten megabytes": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', {413}),
    "deeply nested": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {400, 422}),
    "deeply nested objects": (b'{"prompt": "a", "x": ' + b'{"1": ' * 5_000 + b"1" + b"}" * 5_000 + b"}", {400, 422}),
    "not JSON": (b"\xff\xfe\x00{", {400, 422}),
    "half a surrogate": (b'{"prompt": "\\ud800 abc", "max_tokens": 3}', {200, 400, 422}),
    "bytes that are no text": (b'{"prompt": "\xed\xa0\x80", "max_tokens": 3}', {400, 422}),
    "control characters": (b'{"prompt": "a\\u0000\\u0007\\u202e\\ufeff", "max_tokens": 3}', {200, 400, 422}),
    "stacked accents": (json.dumps({"prompt": "a" + "\u0301" * 400, "max_tokens": 3}).encode(), {200, 400, 422}),
    "a family": (json.dumps({"prompt": "\U0001f468\u200d\U0001f469\u200d\U0001f467"}).encode(), {200, 400, 422}),
    "a token that does not exist": (b'{"prompt": [50]}', {422, 400}),
    "a negative token": (b'{"prompt": [-1]}', {422, 400}),
    "a token beyond 64 bits": (b'{"prompt": [99999999999999999999]}', {422, 400}),
    "no number": (b'{"prompt": "a", "temperature": NaN}', {422, 400}),
    "endless": (b'{"prompt": "a", "max_tokens": 1e400}', {422, 400}),
    "a number of a million digits": (b'{"prompt": "a", "max_tokens": ' + b"9" * 1_000_000 + b"}", {422, 400}),
    "a thousand samples": (b'{"prompt": "a", "n": 1000}', {422, 400}),
    "a thousand prompts": (json.dumps({"prompt": ["a"] * 1000}).encode(), {422, 400}),
    "a thousand stop strings": (json.dumps({"prompt": "a", "stop": ["x"] * 1000}).encode(), {422, 400}),
    "one token, as long as it can be": (json.dumps({"prompt": [1] * 508, "max_tokens": 4}).encode(), {200}),
    "one token, one too long": (json.dumps({"prompt": [1] * 509, "max_tokens": 4}).encode(), {422, 400}),
    "as many tokens as there can be": (json.dumps({"prompt": [1], "max_tokens": 511}).encode(), {200}),
    "one token more than there can be": (json.dumps({"prompt": [1], "max_tokens": 512}).encode(), {422, 400}),
    "nothing": (b'{"prompt": []}', {422, 400}),
}  # fmt: skip


def test_bodies_that_mean_harm_are_refused_or_served(server):
    for name, (content, statuses) in BODIES.items():
        answer = web.post(
            f"{server.url}/v1/completions",
            content=content,
            headers={"content-type": "application/json"},
        )
        assert answer.status_code in statuses, (name, answer.status_code, answer.text[:300])


def test_several_times_as_many_as_fit_are_served_or_told_when_to_come_back(fake_model):
    """And who does as told is served, by the second time at the latest unless the machine is slower than it was."""
    server = Server("fake", fake_model, engine={"step_s": 0.005, "max_queued": 16}).wait()
    try:
        Asking(server, [body(n) for n in range(16)]).wait().check_all()  # by which it knows how long one takes
        asyncio.run(overload(server))
        server.wait_until_idle()
        Asking(server, [body(n) for n in range(16)]).wait().check_all()
    finally:
        server.stop()


async def overload(server: Server) -> None:
    """All are there before the engine looks at the first."""
    (engine,) = server.processes("quire-engine")
    before = server.num_arrived()
    os.kill(engine, signal.SIGSTOP)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def one(number: int) -> int:
            asked = {"prompt": "abcdefgh"[number % 8] + "ijklmnop"[number // 8], "max_tokens": 30, "temperature": 0}
            for attempt in range(MAX_ATTEMPTS):
                answer = await client.post("/v1/completions", json=asked)
                if answer.status_code == 200:
                    assert [answer.json()["choices"][0]["text"]] == expected(asked | {"seed": 0})
                    return attempt
                assert answer.status_code == 429, answer.text
                await asyncio.sleep(float(answer.headers["retry-after"]))
            raise AssertionError("it came back as it was told, and was refused again")

        asking = [asyncio.create_task(one(number)) for number in range(64)]
        while await asyncio.to_thread(server.num_arrived) < before + len(asking):
            await asyncio.sleep(0.05)
        os.kill(engine, signal.SIGCONT)
        attempts = await asyncio.gather(*asking)
        assert max(attempts) > 0, "nobody was refused, so it was no overload"
