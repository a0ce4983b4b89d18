"""Overload: ten times as many requests as can be served, and what becomes of those that are.

    python -m tests.chaos.overload --duration 60

Exits with 1 when anybody is told anything but an answer or 429, when an answer is wrong, when those who are admitted
get their tokens more slowly than without the others, when memory grows, or when the server does not come to rest.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx

from tests.chaos.asking import body, expected
from tests.chaos.conftest import write_tokenizer
from tests.chaos.server import Server
from tests.chaos.soak import Sample, measure

STEP_S = 0.05
SLOTS, TOKENS = 16, 20
CAPACITY = SLOTS / (TOKENS * STEP_S)  # requests a second
TIMES = 10
MAX_GROWTH_BYTES = 32 * 2**20
MAX_SLOWER = 1.5


@dataclass
class Outcome:
    statuses: Counter[int] = field(default_factory=Counter)
    total_s: list[float] = field(default_factory=list)  # of those that were answered
    inference_s: list[float] = field(default_factory=list)  # of those, from the slot to the end
    wrong: list[str] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)
    took_s: float = 0.0


async def ask(client: httpx.AsyncClient, number: int, outcome: Outcome) -> None:
    prompt, begun = body(number), time.monotonic()
    asked = {"inputs": prompt["prompt"], "parameters": {"max_new_tokens": TOKENS, "details": True}}
    answer = await client.post("/generate", json=asked)
    outcome.statuses[answer.status_code] += 1
    if answer.status_code == 429:
        outcome.retry_after_s.append(float(answer.headers["retry-after"]))
    elif answer.status_code == 200:
        outcome.total_s.append(time.monotonic() - begun)
        outcome.inference_s.append(float(answer.headers["x-inference-time"]) / 1000)
        right = expected(prompt | {"temperature": 0, "max_tokens": TOKENS})
        if [answer.json()["generated_text"]] != right:
            outcome.wrong.append(f"{asked} was answered {answer.json()}, right is {right}")
    else:
        outcome.wrong.append(f"{asked} was answered {answer.status_code}: {answer.text}")


async def offer(server: Server, rate: float, seconds: float) -> Outcome:
    """So many requests a second, whatever becomes of those before."""
    outcome = Outcome()
    begun = time.monotonic()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
            group.create_task(ask(client, number, outcome))
    outcome.took_s = time.monotonic() - begun
    return outcome


def run(duration_s: float, folder: Path) -> list[str]:
    write_tokenizer(folder)
    server = Server("fake", folder, engine={"step_s": STEP_S, "max_queued": SLOTS}).wait()
    try:
        asyncio.run(offer(server, TIMES * CAPACITY, 3))  # a warm-up of all there is
        alone = asyncio.run(offer(server, CAPACITY / 2, 10))
        server.wait_until_idle()
        before = measure(server, 0)
        crowd = asyncio.run(offer(server, TIMES * CAPACITY, duration_s))
        server.wait_until_idle()
        time.sleep(1)
        after = measure(server, 0)
        return judge(alone, crowd, before, after)
    finally:
        server.stop()


def judge(alone: Outcome, crowd: Outcome, before: Sample, after: Sample) -> list[str]:
    took_s = crowd.took_s
    offered, answered = sum(crowd.statuses.values()) / took_s, crowd.statuses[200] / took_s
    print(f"capacity {CAPACITY:g} a second; offered {offered:.0f} for {took_s:.0f} s: {dict(crowd.statuses)}")
    print(f"answered {answered:.1f} a second, {100 * answered / CAPACITY:.0f} % of capacity")
    slot_to_end = median(alone.inference_s), median(crowd.inference_s)
    print(f"from slot to end: median {slot_to_end[0]:.3f} s alone, {slot_to_end[1]:.3f} s in the crowd")
    print(f"from asking to end: median {median(alone.total_s):.3f} s alone, {median(crowd.total_s):.3f} s in the crowd")
    print(f"Retry-After: {min(crowd.retry_after_s):g} to {max(crowd.retry_after_s):g} s")
    slower = slot_to_end[1] / slot_to_end[0]
    found = alone.wrong[:3] + crowd.wrong[:3]
    if slower > MAX_SLOWER:
        found.append(f"those who are admitted are {slower:.2f} times slower; {MAX_SLOWER} is allowed")
    for name, now in after.num_bytes.items():
        print(f"{name}: {before.num_bytes[name] / 2**20:.1f} MiB before, {now / 2**20:.1f} after")
        if now - before.num_bytes[name] > MAX_GROWTH_BYTES:
            found.append(f"{name} has grown by {(now - before.num_bytes[name]) / 2**20:.1f} MiB")
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
