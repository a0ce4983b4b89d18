"""The first minute of a server with nothing compiled: when it is ready, when all programs are there, and how fast it
answers meanwhile, against the same load afterwards.

    python bench/first_minute.py random:llama-3.1-8b [--rate 12] [--seconds 8] [--log FILE]
    python bench/first_minute.py random:llama-3.1-8b --args "--compile-processes 0"

Requests arrive on their own, as in `open_loop.py`; lengths are those of its defaults. Weights are random, and tokens
have made-up names.
"""

import argparse
import asyncio
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from open_loop import FINISH_S, Length, Traffic, row
from random_model import write_model
from start import LIMIT_S, POLL_S, cpu_seconds, free_port, health

from quire.cli.bench.serving_client import Server
from quire.cli.bench.serving_load import Shape, run_load
from quire.cli.bench.serving_report import COLUMNS, Goal, cells, errors, numbers

TOLD = re.compile(r"compile_processes|process|more programs|all programs|first run|a step waits|native|error", re.I)


def metric(port: int, name: str) -> float | None:
    """The sum of all methods; None before the engine has told it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)", answer.read().decode(), re.M)
    return sum(map(float, found)) if found else None


def used(port: int, server: int) -> dict[str, float]:
    """Of the server so far: tokens and padding of steps, seconds of processors; those that its group was held up."""
    names = ("quire_step_tokens", "quire_step_padding_tokens_total")
    found = {name: metric(port, name) or 0.0 for name in names} | {"cpu_s": cpu_seconds(server)}
    throttled = Path("/sys/fs/cgroup/cpu.stat")
    if throttled.exists() and "throttled_usec" in (text := throttled.read_text()):
        found["throttled_s"] = int(text.partition("throttled_usec")[2].split()[0]) / 1e6
    return found


def threads(process: int) -> dict[str, tuple[float, float]]:
    """Of a process and its children: seconds that each thread ran, and that it waited for a processor."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            ran, waited, _ = (task / "schedstat").read_text().split()
        except OSError:  # it has ended
            continue
        found[f"{process}/{task.name} {(task / 'comm').read_text().strip()}"] = int(ran) / 1e9, int(waited) / 1e9
        for child in (task / "children").read_text().split():
            found |= threads(int(child))
    return found


def busiest(server: int, before: dict[str, tuple[float, float]]) -> str:
    change = {name: (ran - before.get(name, (0, 0))[0], waited - before.get(name, (0, 0))[1])
              for name, (ran, waited) in threads(server).items()}  # fmt: skip
    names = sorted(change, key=lambda name: -change[name][0])
    ours = [name for name in names if "quire" in name][:4]
    shown = [*ours, *[name for name in names if name not in ours][:3]]
    return "; ".join(f"{name} ran {change[name][0]:.1f} s, waited {change[name][1]:.2f}" for name in shown)


async def load(port: int, given: argparse.Namespace, name: str, server: int) -> None:
    before, its_threads = used(port, server), threads(server)
    await send(port, given, name)
    after = used(port, server)
    print(
        ", ".join(f"{name} {after[name] - before[name]:.1f}" for name in after), busiest(server, its_threads), sep="\n"
    )


async def send(port: int, given: argparse.Namespace, name: str) -> None:
    server = Server(f"http://127.0.0.1:{port}")
    await server.find_model()
    prompt, answer = Length(given.prompt_median, 1.0, 16, given.prompt_max), Length(given.answer_median, 0.7, 8, 512)
    traffic = Traffic(prompt, answer, 0, 1, given.vocab, 1.0)
    run = await run_load(
        server, Shape(rate=given.rate), traffic.conversations(name), within_s=given.seconds + FINISH_S,
        arrivals_s=given.seconds, seed="7",
    )  # fmt: skip
    print(row(name, cells(numbers(run, Goal()))), flush=True)
    for kind, fault in errors(run).items():
        print(f"{kind}, {fault['count']} times: {fault['first'] or ''}", flush=True)


def measure(command: list[str], port: int, given: argparse.Namespace, log: Path) -> None:
    begun = time.monotonic()
    with log.open("wb") as out:
        running = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out)
    try:
        while health(port) != 200:
            if running.poll() is not None or time.monotonic() - begun > LIMIT_S:
                raise SystemExit(f"{shlex.join(command)} did not start:\n{log.read_text()[-3000:]}")
            time.sleep(POLL_S)
        print(f"ready after {time.monotonic() - begun:.2f} s", flush=True)
        print(row("load", list(COLUMNS)), row("---", ["---:"] * len(COLUMNS)), sep="\n", flush=True)
        asyncio.run(load(port, given, "at once", running.pid))
        while metric(port, "quire_unfinished_programs") != 0:
            time.sleep(0.2)
        print(f"all programs are there {time.monotonic() - begun:.2f} s after the start", flush=True)
        time.sleep(given.idle)  # programs run for the first time, and steps are timed
        asyncio.run(load(port, given, "afterwards", running.pid))
        asyncio.run(load(port, given, "once more", running.pid))
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--args", default="", help="flags of `quire serve`")
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds between all programs and the next load")
    parser.add_argument("--prompt-median", type=int, default=500)
    parser.add_argument("--prompt-max", type=int, default=4096)
    parser.add_argument("--answer-median", type=int, default=150)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--log", help="keep the server's log in this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        log = Path(given.log or folder / "log")
        command = [sys.executable, "-m", "quire", "serve", "--model", write_model(given.model, folder / "model")]
        command += ["--cache-dir", str(folder / "cache"), "--log-level", "debug", *shlex.split(given.args)]
        measure(command, free_port(), given, log)
        print("\n".join(line for line in log.read_text().splitlines() if TOLD.search(line)))
        kept = [path for timings in folder.rglob("timings") for path in timings.rglob("*")]
        print(f"{len(kept)} timings of XLA are kept, as {[path.name for path in kept[:4]]}")


if __name__ == "__main__":
    main()
