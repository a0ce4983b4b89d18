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
import tempfile
import time
from pathlib import Path

from open_loop import FINISH_S, Length, Traffic, print_run, row
from random_model import write_model
from servers import QUIRE, ServerProcess, cpu_seconds

from quire.cli.bench.serving_client import Server
from quire.cli.bench.serving_load import Shape, run_load
from quire.cli.bench.serving_report import COLUMNS, Goal

LOGGED = re.compile(r"compile_processes|process|more programs|all programs|first run|a step waits|native|error", re.I)
COUNTERS = ("quire_step_tokens", "quire_step_padding_tokens_total")


def total(server: ServerProcess, name: str) -> float | None:
    """The sum over all labels; None before the engine has sent it."""
    values = [value for label, value in server.metrics(name).items() if re.fullmatch(rf"{name}(\{{.*\}})?", label)]
    return sum(values) if values else None


async def load(server: ServerProcess, given: argparse.Namespace, name: str) -> None:
    """One load, with the tokens and the padding of its steps, and seconds of processors."""

    def used() -> dict[str, float]:
        return {name: total(server, name) or 0.0 for name in COUNTERS} | {"cpu_s": cpu_seconds(server.process.pid)}

    before, client = used(), Server(server.url)
    await client.find_model()
    prompt, answer = Length(given.prompt_median, 1.0, 16, given.prompt_max), Length(given.answer_median, 0.7, 8, 512)
    traffic = Traffic(prompt, answer, 0, 1, given.vocab, 1.0)
    run = await run_load(
        client, Shape(rate=given.rate), traffic.conversations(name), within_s=given.seconds + FINISH_S,
        arrivals_s=given.seconds, seed="7",
    )  # fmt: skip
    print_run(name, run, Goal())
    after = used()
    print(", ".join(f"{name} {after[name] - before[name]:.1f}" for name in after), flush=True)


def measure(command: list[str], given: argparse.Namespace, log: Path) -> None:
    with log.open("wb") as out, ServerProcess(command, out) as server:
        print(f"ready after {server.wait_until_ready():.2f} s", flush=True)
        print(row("load", list(COLUMNS)), row("---", ["---:"] * len(COLUMNS)), sep="\n", flush=True)
        asyncio.run(load(server, given, "at once"))
        while total(server, "quire_unfinished_programs") != 0:
            time.sleep(0.2)
        print(f"all programs are there {time.monotonic() - server.began_s:.2f} s after the start", flush=True)
        time.sleep(given.idle)  # programs run for the first time, and steps are timed
        asyncio.run(load(server, given, "afterwards"))
        asyncio.run(load(server, given, "once more"))


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
        command = [*QUIRE, "serve", "--model", write_model(given.model, folder / "model")]
        command += ["--cache-dir", str(folder / "cache"), "--log-level", "debug", *shlex.split(given.args)]
        measure(command, given, log)
        print("\n".join(line for line in log.read_text().splitlines() if LOGGED.search(line)))


if __name__ == "__main__":
    main()
