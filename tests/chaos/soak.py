"""Soak: a server under load for hours, and whether anything of it grows.

    python -m tests.chaos.soak --duration 3600

Watches the memory, files and threads of every process and the pages of the cache. The load has a rhythm: it rests now
and then, and numbers are taken at rest. Exits with 1 when a process was replaced, when what is measured at rest has
grown since the warm-up, or when a page is not back.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx

from tests.chaos.asking import expected
from tests.chaos.clients import stream
from tests.chaos.conftest import write_tokenizer
from tests.chaos.server import Server
from tests.chaos.storm import fake_bodies
from tests.patience import WAIT_S

NUM_CLIENTS = 32
LOAD_S = 8.0
WARM_UP = 0.3  # of the time: caches fill, allocators find their size
MAX_GROWTH_BYTES = 8 * 2**20
MAX_GROWTH_FILES = 4
MAX_GROWTH_THREADS = 0
NUM_PAGES = 1199  # of the fake engine that are handed out


class Sample(NamedTuple):
    at_s: float
    num_bytes: dict[str, int]  # by process
    num_files: dict[str, int]
    num_threads: dict[str, int]


def measure(server: Server, begun_s: float) -> Sample:
    pids = {"supervisor": server.process.pid}
    for name in ("quire-engine", "quire-http"):
        pids |= {f"{name} {pid}": pid for pid in server.processes(name)}
    status = {name: Path(f"/proc/{pid}/status").read_text(encoding="utf-8") for name, pid in pids.items()}
    fields = {name: dict(line.split(":", 1) for line in text.splitlines()) for name, text in status.items()}
    return Sample(
        time.monotonic() - begun_s,
        {name: int(field["VmRSS"].split()[0]) * 1024 for name, field in fields.items()},
        {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
        {name: int(field["Threads"]) for name, field in fields.items()},
    )


async def load(server: Server, chance: random.Random, seconds: float) -> int:
    """How many were answered, all of them rightly."""
    bodies = fake_bodies(chance)
    until_s = time.monotonic() + seconds
    num_answered = 0

    async def ask_on(client: httpx.AsyncClient) -> None:
        nonlocal num_answered
        while time.monotonic() < until_s:
            asked = chance.choice(bodies)
            leaves = chance.random() < 0.2
            heard = await stream(client, asked, leave_after=chance.randrange(1, 20) if leaves else None)
            if heard.error is not None or (heard.is_complete and heard.texts != expected(asked)):
                raise AssertionError(f"{asked} was answered {heard}")
            num_answered += heard.is_complete

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(NUM_CLIENTS):
            group.create_task(ask_on(client))
    return num_answered


def growth(samples: list[Sample]) -> list[str]:
    """What has grown since the warm-up: by the medians of the first and the last third, so that neither a number that
    comes down again counts nor one that happens to be low at the end is missed."""
    warm = samples[max(1, int(len(samples) * WARM_UP)) :]
    third = max(1, len(warm) // 3)
    found = []
    for kind, most in (
        ("num_bytes", MAX_GROWTH_BYTES), ("num_files", MAX_GROWTH_FILES), ("num_threads", MAX_GROWTH_THREADS)
    ):  # fmt: skip
        for name in getattr(warm[0], kind):
            before = median(getattr(sample, kind)[name] for sample in warm[:third])
            after = median(getattr(sample, kind)[name] for sample in warm[-third:])
            if after - before > most:
                found.append(f"{kind} of {name} grew from {before:.0f} to {after:.0f}; {most} more are allowed")
    return found


def soak(duration_s: float, seed: int, folder: Path) -> list[str]:
    """What went wrong."""
    chance = random.Random(seed)
    write_tokenizer(folder)
    server = Server("fake", folder, engine={"step_s": 0.001}, settings={"http_workers": 2}).wait()
    samples: list[Sample] = []
    num_answered = 0
    try:
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < duration_s:
            num_answered += asyncio.run(load(server, chance, LOAD_S))
            metrics = server.wait_until_idle()
            pages = sum(metrics[f"quire_pages_{state}"] for state in ("free", "cached"))
            if pages != NUM_PAGES or metrics["quire_page_repairs"]:
                return [f"{pages} pages of {NUM_PAGES} are back"]
            time.sleep(1.0)
            samples.append(measure(server, begun_s))
            if samples[-1].num_bytes.keys() != samples[0].num_bytes.keys():
                return [
                    f"processes were replaced: {sorted(samples[0].num_bytes)} are now {sorted(samples[-1].num_bytes)}"
                ]
        report(samples, num_answered)
        if len(samples) < 4:
            return [f"{len(samples)} measurements say nothing about growth; soak for longer"]
        return growth(samples)
    finally:
        server.stop()


def report(samples: list[Sample], num_answered: int) -> None:
    took_s = samples[-1].at_s
    print(f"{num_answered} requests answered in {took_s:.0f} s, {len(samples)} measurements at rest")
    for name in samples[0].num_bytes:
        mega = [sample.num_bytes[name] / 2**20 for sample in samples]
        shown = ", ".join(f"{one:.1f}" for one in mega[:: max(1, len(mega) // 8)])
        files, threads = (
            [getattr(one, kind)[name] for one in (samples[0], samples[-1])] for kind in ("num_files", "num_threads")
        )
        print(f"  {name}: {shown} MiB; files {files[0]} to {files[1]}, threads {threads[0]} to {threads[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(given.duration, given.seed, Path(folder))
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
