"""The start of a server: from the command to its first answer, to readiness and to the first token, and its CPU time.

    python bench/start.py                                        # this version, three times
    python bench/start.py --peer "before=OLD/python -m quire"    # and another one, in turns
    python bench/start.py --cold --rounds 1 --timeline --random llama-3.1-8b    # on a GPU

CPU time, of all processes until the first token, tells versions apart on a busy machine too. The first round of each
command is not counted: it keeps programs and weights for those after it. `--cold` gives every round a cache folder with
nothing but the default model in it instead. `--timeline` prints what the server logs, and when.
"""

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from random_model import write_model
from servers import QUIRE, ServerProcess, cpu_seconds

LINE_WIDTH = 160  # characters of a line in a timeline
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Start(NamedTuple):
    """Seconds from the command."""

    answer: float  # that it starts: 503 with a reason
    ready: float
    token: float  # the first of a stream
    cpu: float  # of all processes, until then


def print_times(lines: Iterable[bytes], began_s: float) -> None:
    """Print each line when it comes, with the seconds since the start."""
    for line in lines:
        print(f"{time.monotonic() - began_s:7.2f}  {line.decode(errors='replace').rstrip()[:LINE_WIDTH]}", flush=True)


def measure(command: Sequence[str], has_timeline: bool = False) -> Start:
    with ServerProcess(command, subprocess.PIPE if has_timeline else subprocess.DEVNULL) as server:
        if server.process.stdout is not None:
            Thread(target=print_times, args=(server.process.stdout, server.began_s), daemon=True).start()
        answered_s: list[float] = []

        def note(status: int | None) -> None:
            if status is not None and not answered_s:
                answered_s.append(time.monotonic() - server.began_s)

        ready_s = server.wait_until_ready(note)
        first_s, *_ = server.stream({"prompt": "The sky is", "max_tokens": 4})
        cpu_s = cpu_seconds(server.process.pid)
        return Start(next(iter(answered_s), ready_s), ready_s, ready_s + first_s, cpu_s)


def measure_cold(command: Sequence[str], has_timeline: bool) -> Start:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path("~/.cache/quire", MODEL_FILE).expanduser()
        if kept.exists():
            shutil.copy2(kept, folder)
        return measure([*command, "--cache-dir", folder], has_timeline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--args", default="", help="flags of `quire serve`")
    parser.add_argument("--peer", action="append", default=[], help="NAME=COMMAND of another quire")
    parser.add_argument("--cold", action="store_true", help="nothing compiled and nothing kept")
    parser.add_argument("--random", help="serve random weights of this name, as llama-3.1-8b")
    parser.add_argument("--timeline", action="store_true", help="print what the server logs, and when")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.random and write_model(f"random:{given.random}", Path(folder) / "model")
        compare(given, ["--model", model] if model else [])


def compare(given: argparse.Namespace, model: list[str]) -> None:
    level = ["--log-level", "debug"] if given.timeline else []
    peers = (peer.partition("=") for peer in given.peer)
    commands = {"quire": QUIRE} | {name: shlex.split(command) for name, _, command in peers}
    flags = ["serve", *model, *shlex.split(given.args), *level]
    starts: dict[str, list[Start]] = {name: [] for name in commands}
    for number in range(given.rounds + (not given.cold)):
        for name, command in commands.items():
            start = (measure_cold if given.cold else measure)([*command, *flags], given.timeline)
            if number or given.cold:
                starts[name].append(start)
    print(f"median of {given.rounds}, seconds; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':12} {'answers':>8} {'ready':>8} {'token':>8} {'CPU':>8}")
    for name, measured in starts.items():
        medians = [statistics.median(part) for part in zip(*measured, strict=True)]
        print(f"{name:12} " + " ".join(f"{median:8.2f}" for median in medians))


if __name__ == "__main__":
    main()
