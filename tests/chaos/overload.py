"""Overload: ten times as many requests as can be served, and what becomes of those that are.

    python -m tests.chaos.overload --duration 60

Most of the crowd takes no advice; one in `PATIENT` comes back when it was told to, with what it asked before, which
nobody else asks. Exits with 1 when the crowd was smaller than said, when anybody is told anything but an answer or 429,
when an answer is wrong, when those who are admitted get their tokens more slowly than without the others, when somebody
who came back as told was not served, when memory grows, or when the server does not come to rest.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.chaos.asking import body, expected
from tests.chaos.clients import post, written
from tests.chaos.conftest import write_tokenizer
from tests.chaos.server import Server
from tests.chaos.soak import NUM_PAGES, Sample, measure

STEP_S = 0.05
SLOTS, TOKENS, MAX_QUEUED = 16, 20, 16
CAPACITY = SLOTS / (TOKENS * STEP_S)  # requests a second
TIMES = 10
PATIENT = 160
MAX_GROWTH_BYTES = 32 * 2**20
MAX_SLOWER = 1.5
MAX_CPU = 0.05  # of a core, at rest


class Asked(NamedTuple):
    raw: bytes
    right: str


def asked(prompt: str) -> Asked:
    raw = written("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": TOKENS, "details": True}})
    return Asked(raw, expected({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "seed": 0})[0])


KINDS = [asked(body(number)["prompt"]) for number in range(112)]


@dataclass
class Outcome:
    statuses: Counter[int] = field(default_factory=Counter)
    total_s: list[float] = field(default_factory=list)  # of those that were answered, from asking the last time
    inference_s: list[float] = field(default_factory=list)  # of those, from the slot to the end
    wrong: list[str] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)  # how often the patient came back
    rate: float = 0.0  # at which they came, not counting those that came back
    answer_rate: float = 0.0  # meanwhile


async def ask(url: str, one: Asked, outcome: Outcome) -> float | None:
    """When to come back, if it was refused."""
    begun = time.monotonic()
    answer = await post(url, one.raw)
    outcome.statuses[answer.status] += 1
    if answer.status == 429:
        outcome.retry_after_s.append(float(answer.headers["retry-after"]))
        return outcome.retry_after_s[-1]
    if answer.status == 200:
        outcome.total_s.append(time.monotonic() - begun)
        outcome.inference_s.append(float(answer.headers["x-inference-time"]) / 1000)
    if answer.status != 200 or json.loads(answer.content)["generated_text"] != one.right:
        outcome.wrong.append(f"{one} was answered {answer.status}: {answer.content!r}")
    return None


async def ask_patiently(url: str, number: int, outcome: Outcome) -> None:
    one = asked("".join("abcdefghij"[int(digit)] for digit in f"{number:06}"))
    returns = 0
    while (retry_after_s := await ask(url, one, outcome)) is not None:
        await asyncio.sleep(retry_after_s)
        returns += 1
    outcome.returns.append(returns)


async def offer(server: Server, rate: float, seconds: float) -> Outcome:
    """So many requests a second, whatever becomes of those before."""
    outcome = Outcome()
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            if number % PATIENT:
                group.create_task(ask(server.url, KINDS[number % len(KINDS)], outcome))
            else:
                group.create_task(ask_patiently(server.url, number, outcome))
        took_s = time.monotonic() - begun
        outcome.rate, outcome.answer_rate = (number + 1) / took_s, outcome.statuses[200] / took_s
    return outcome


async def come_back(server: Server) -> Outcome:
    """All at once, as many as run and wait, and as many again as wait: who is refused does as told."""
    outcome = Outcome()
    await asyncio.gather(*(ask_patiently(server.url, number, outcome) for number in range(SLOTS + 2 * MAX_QUEUED)))
    return outcome


class Watch:
    """Memory and the length of the queue, once a second."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self.samples: list[Sample] = []
        self.longest_queue = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(1.0):
            self.samples.append(measure(self._server, 0))
            self.longest_queue = max(self.longest_queue, self._server.metrics()["tgi_queue_size"])

    def stop(self) -> "Watch":
        self._over.set()
        self._thread.join()
        return self


def run(duration_s: float, folder: Path) -> list[str]:
    write_tokenizer(folder)
    server = Server("fake", folder, engine={"step_s": STEP_S, "max_queued": MAX_QUEUED}).wait()
    try:
        asyncio.run(offer(server, TIMES * CAPACITY, 3))  # a warm-up of all there is
        alone = asyncio.run(offer(server, CAPACITY / 2, 10))
        server.wait_until_idle()
        before = measure(server, 0)
        watch = Watch(server)
        crowd = asyncio.run(offer(server, TIMES * CAPACITY, duration_s))
        watch.stop()
        back = asyncio.run(come_back(server))
        found = judge(alone, crowd, back)
        return found + judge_memory(before, watch) + judge_rest(server, before)
    finally:
        server.stop()


def judge(alone: Outcome, crowd: Outcome, back: Outcome) -> list[str]:
    print(f"capacity {CAPACITY:g} a second, offered {crowd.rate:.0f}: {dict(crowd.statuses)}")
    print(f"answered {crowd.answer_rate:.1f} a second, {100 * crowd.answer_rate / CAPACITY:.0f} % of capacity")
    for name, attribute in (("from slot to end", "inference_s"), ("from asking to end", "total_s")):
        told = [
            f"median {median(times):.3f} s, highest {max(times):.3f} s"
            for times in (getattr(alone, attribute), getattr(crowd, attribute))
        ]
        print(f"{name}: {told[0]} alone; {told[1]} in the crowd")
    print(f"Retry-After: {min(crowd.retry_after_s):g} to {max(crowd.retry_after_s):g} s")
    print(f"who did as told in the crowd came back {dict(Counter(crowd.returns))} (times: clients)")
    print(f"{SLOTS + 2 * MAX_QUEUED} at once, who did as told came back {dict(Counter(back.returns))} (times: clients)")
    found = alone.wrong[:3] + crowd.wrong[:3] + back.wrong[:3]
    slower = median(crowd.inference_s) / median(alone.inference_s)
    if slower > MAX_SLOWER:
        found.append(f"those who are admitted are {slower:.2f} times slower; {MAX_SLOWER} is allowed")
    if crowd.rate < 0.95 * TIMES * CAPACITY:
        found.append(f"{crowd.rate:.0f} requests a second came, not {TIMES * CAPACITY:.0f}: it was no such overload")
    if max(crowd.returns + back.returns) > 1:
        found.append(f"somebody came back as told and was not served, {max(crowd.returns + back.returns) - 1} times")
    return found


def judge_memory(before: Sample, watch: Watch) -> list[str]:
    found = []
    for name, was in before.num_bytes.items():
        seen = [sample.num_bytes[name] / 2**20 for sample in watch.samples]
        shown = ", ".join(f"{one:.1f}" for one in seen[:: max(1, len(seen) // 8)])
        print(f"{name}: {was / 2**20:.1f} MiB before; {shown}, highest {max(seen):.1f}")
        if max(seen) - was / 2**20 > MAX_GROWTH_BYTES / 2**20:
            found.append(f"{name} has grown by {max(seen) - was / 2**20:.1f} MiB")
    print(f"longest queue seen: {watch.longest_queue:g}")
    if watch.longest_queue > MAX_QUEUED:
        found.append(f"{watch.longest_queue:g} waited; {MAX_QUEUED} may")
    return found


def judge_rest(server: Server, before: Sample, seconds: float = 5.0) -> list[str]:
    metrics = server.wait_until_idle()
    time.sleep(1)
    begun_s = server.cpu_s()
    time.sleep(seconds)
    cpu = (server.cpu_s() - begun_s) / seconds
    after = measure(server, 0)
    pages = {state: metrics[f"quire_pages_{state}"] for state in ("free", "cached", "active")}
    print(
        f"at rest: pages {pages} of {NUM_PAGES}, repairs {metrics['quire_page_repairs']:g}, {100 * cpu:.1f} % of a core"
    )
    print(f"files {sum(before.num_files.values())} before, {sum(after.num_files.values())} after")
    found = []
    if after.num_bytes.keys() != before.num_bytes.keys():
        found.append("a process was replaced")
    if pages["free"] + pages["cached"] != NUM_PAGES or metrics["quire_page_repairs"]:
        found.append("not all pages are back")
    if cpu > MAX_CPU:
        found.append(f"at rest it takes {100 * cpu:.1f} % of a core; {100 * MAX_CPU:g} are allowed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--duration", type=float, default=60.0, help="seconds")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = run(given.duration, Path(folder))
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
