"""Chaos: a real server, real clients and random faults, with every token checked.

    python -m tests.chaos.storm --seed 1 --duration 300 [--engine fake|tiny|MODEL] [--data-parallel 2]

With the fake engine what is right can be worked out by hand. With a model, every request is asked once before the storm
begins, and must be answered alike in it; answers that part where two tokens were level are counted apart. Exits with 1
on the first wrong token, lost stream or page.
"""

import argparse
import asyncio
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.asking import body, expected
from tests.chaos.clients import Heard, stream
from tests.chaos.conftest import write_tokenizer
from tests.chaos.near_ties import Scored, is_near_tie, score, was_drawn_between
from tests.chaos.server import Server
from tests.patience import WAIT_S
from tests.tiny_chat_model import SIZES, write_tiny_chat_model

NUM_CLIENTS = 24
NUM_KINDS = 24  # of requests to a model, each asked once before the storm
DYING_S = 2.0  # that an HTTP worker may take to end by a signal
MAX_MORE_FILES = 4  # that the supervisor has open afterwards
Answers = Callable[[dict[str, Any]], list[str]]


class Storm:
    """Clients that ask without a pause, and one who does harm. `answers` knows what is right."""

    def __init__(
        self,
        server: Server,
        seed: int,
        duration_s: float,
        answers: Answers,
        bodies: list[dict[str, Any]],
        scored: dict[str, Scored] | None = None,
    ) -> None:
        """`scored`: of a model, what is known of its greedy answers; no harm is done to one before it has recovered."""
        self._server = server
        self._chance = random.Random(seed)
        self._until_s = time.monotonic() + duration_s
        self._answers = answers
        self._bodies = bodies
        self._scored = scored or {}
        self._is_patient = scored is not None
        self._doubtful: list[tuple[dict[str, Any], str, str]] = []  # what was sampled, what is right, what was said
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._worker_struck_s = -math.inf

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self._server.url, timeout=WAIT_S, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(NUM_CLIENTS):
                group.create_task(self._ask_on(client))
            group.create_task(self._do_harm(client))

    def _is_over(self) -> bool:
        return time.monotonic() > self._until_s or bool(self.wrong)

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while not self._is_over():
            asked = self._chance.choice(self._bodies)
            manner = self._chance.choices(("listens", "leaves", "reads slowly"), (8, 2, 1))[0]
            leave_after = self._chance.randrange(1, 30) if manner == "leaves" else None
            delay_s = 0.02 if manner == "reads slowly" else 0.0
            begun_s = time.monotonic()
            heard = await stream(client, asked, delay_s, leave_after)
            self._judge(asked, heard, manner, self._worker_struck_s > begun_s - DYING_S)

    def _judge(self, asked: dict[str, Any], heard: Heard, manner: str, worker_died: bool) -> None:
        right = self._answers(asked)
        scored = self._scored.get(str(asked))
        parts = heard.error is None and not all(
            text == said if heard.is_complete else text.startswith(said.rstrip("\ufffd"))
            for text, said in zip(right, heard.texts, strict=True)
        )
        if heard.error is not None:
            self.wrong.append(f"{asked} was answered {heard.status}: {heard.error}")
        elif parts and scored is not None and is_near_tie(scored, heard.texts[0]):
            self.counts["near ties"] += 1
        elif parts and self._is_patient and asked["temperature"]:
            self._doubtful.append((asked, right[0], heard.texts[0]))
        elif parts:
            self.wrong.append(f"{asked} was told {heard.texts}, right is {right}")
        elif heard.is_complete:
            self.counts["answered"] += 1
        elif manner == "leaves":
            self.counts["left"] += 1
        elif worker_died:
            self.counts["cut off with their HTTP worker"] += 1
        else:
            self.wrong.append(f"{asked} was cut off, and no HTTP worker had died")

    async def settle(self) -> None:
        """After the storm: were those who were sampled something else near ties?"""
        async with httpx.AsyncClient(base_url=self._server.url, timeout=WAIT_S) as client:
            for asked, right, said in self._doubtful:
                if await was_drawn_between(client, asked, right, said):
                    self.counts["near ties"] += 1
                else:
                    self.wrong.append(f"{asked} was told {said!r}, right is {right!r}")

    async def _do_harm(self, client: httpx.AsyncClient) -> None:
        harms = {
            "engine killed": (4, lambda: self._strike_engine(signal.SIGKILL)),
            "engine aborted": (1, lambda: self._strike_engine(signal.SIGABRT)),
            "engine stopped": (1, lambda: self._strike_engine(signal.SIGSTOP)),
            "HTTP worker killed": (2, lambda: self._strike_worker(signal.SIGKILL)),
            "HTTP worker stopped": (1, lambda: self._strike_worker(signal.SIGSTOP)),
        }
        first: str | None = "engine killed"  # so that the shortest storm has a restart
        while not self._is_over():
            while self._is_patient and not self._is_over() and not await is_healthy(client):
                await asyncio.sleep(0.5)
            await asyncio.sleep(self._chance.uniform(1.0, 6.0) * (2 if self._is_patient else 1))
            name = first or self._chance.choices(list(harms), [weight for weight, _ in harms.values()])[0]
            if harms[name][1]():
                self.counts[name] += 1
                first = None

    def _strike_engine(self, number: signal.Signals) -> bool:
        """Of several engines, any."""
        return self._server.kill("quire-engine", self._chance.randrange(60), number)

    def _strike_worker(self, number: signal.Signals) -> bool:
        """A client that comes after it has stopped waits for the next one; on a busy machine it stops later."""
        self._worker_struck_s = time.monotonic()
        return self._server.kill("quire-http", self._chance.randrange(2), number)


async def is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


def fake_bodies(chance: random.Random) -> list[dict[str, Any]]:
    def one(number: int) -> dict[str, Any]:
        asked = body(number, max_tokens=chance.choice([1, 8, 40, 120]))
        if number % 5 == 0:
            asked |= {"n": 3, "temperature": 1}
        if number % 7 == 0:
            asked |= {"stop": chance.choice("abc")}
        return asked

    return [one(number) for number in range(200)]


def model_bodies(chance: random.Random) -> list[dict[str, Any]]:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    guided = {"response_format": {"type": "regex", "value": "([a-z]{2,8} [0-9]{1,3}[.] ){2,6}"}}
    return [
        {
            "prompt": " ".join(chance.choices(words, k=chance.randrange(1, 6))),
            "max_tokens": chance.choice([4, 16, 48]),
            "temperature": number % 2,
            "seed": number,
        }
        | (guided if number % 6 > 3 else {})
        for number in range(NUM_KINDS)
    ]


async def ask_each_alone(url: str, bodies: list[dict[str, Any]]) -> tuple[dict[str, list[str]], dict[str, Scored]]:
    """What is said to each, and how close that was where it is greedy."""
    known, scored = {}, {}
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        for asked in bodies:
            heard = await stream(client, asked)
            assert heard.is_complete, heard
            known[str(asked)] = heard.texts
            if not asked["temperature"]:
                scored[str(asked)] = await score(client, asked)
                assert [scored[str(asked)].text] == heard.texts
    return known, scored


def run_storm(engine: str, seed: int, duration_s: float, one_in: int, folder: Path, data_parallel: int = 1) -> Storm:
    """The storm, after it is over and the server has come to rest. Asserts that it does."""
    settings = {
        "http_workers": 2, "data_parallel": data_parallel,
        "worker_restart_after_s": 3.0, "max_engine_restarts": 1_000_000,
        "restart_after_s": 1.5 if engine == "fake" else 5.0,  # while a model is loaded its process is silent
    }  # fmt: skip
    chance = random.Random(seed)
    faults = {"one_in": one_in, "seed": seed}
    if engine == "fake":
        write_tokenizer(folder)
        server = Server(
            "fake", folder, engine={"step_s": 0.003, "max_burst": seed % 4 + 1}, faults=faults, settings=settings
        )
    else:
        model = write_tiny_chat_model(folder) if engine == "tiny" else engine
        config = SIZES | {"max_batch_size": 8, "cache_dir": str(folder / "programs")} if engine == "tiny" else {}
        server = Server("model", model, config=config, faults=faults, settings=settings)
    try:
        server.wait()
        if engine == "fake":
            bodies, answers, scored = fake_bodies(chance), expected, None
        else:
            bodies = model_bodies(chance)
            known, scored = asyncio.run(ask_each_alone(server.url, bodies))

            def answers(asked: dict[str, Any]) -> list[str]:
                return known[str(asked)]

        storm = Storm(server, seed, duration_s, answers, bodies, scored)
        num_files = server.num_files()
        asyncio.run(storm.run())
        if not storm.wrong:
            for pid in server.processes("quire-engine"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            server.wait_until_idle()
            asyncio.run(storm.settle())
            metrics = server.wait_until_idle()
            storm.counts["engine restarts"] = int(metrics["quire_engine_restarts"])
            storm.counts["accounts repaired"] = int(metrics["quire_page_repairs"])
            if metrics["quire_page_repairs"]:
                storm.wrong.append("the accounts of pages were wrong")
            if server.num_files() > num_files + MAX_MORE_FILES:
                storm.wrong.append(f"the supervisor had {num_files} files open, and has {server.num_files()}")
            if server.stop() != 0:
                storm.wrong.append("the server did not end well")
        if storm.wrong:
            print("\n".join(server.log.lines()[-60:]), file=sys.stderr)
        return storm
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--duration", type=float, default=60.0, help="seconds")
    parser.add_argument("--engine", default="fake", help="fake, tiny, or a model's name")
    parser.add_argument("--one-in", type=int, default=2000, help="one step in so many fails by chance")
    parser.add_argument("--data-parallel", type=int, default=1, help="engines")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.duration:g} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        storm = run_storm(given.engine, given.seed, given.duration, given.one_in, Path(folder), given.data_parallel)
    for name, count in sorted(storm.counts.items()):
        print(f"{count:8} {name}")
    for line in storm.wrong[:5]:
        print(f"WRONG: {line}")
    return 1 if storm.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
