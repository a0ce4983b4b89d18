"""The start of a server: from the command to its first answer, to readiness and to the first token, and its CPU time.

    python bench/start.py                                        # this version, twice
    python bench/start.py --peer "before=OLD/python -m quire"    # and another one, in turns
    python bench/start.py --cold --rounds 1 --timeline --random llama-3.1-8b    # on a GPU

CPU time, of all processes until the first token, tells versions apart on a busy machine too. The first round of each
command is not counted: it keeps programs and weights for those after it. `--cold` gives every round a cache folder with
nothing but the default model in it instead. `--timeline` prints what the server logs, and when.
"""

import argparse
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from random_model import write_model

POLL_S = 0.02
LIMIT_S = 600.0
LINE_WIDTH = 160  # characters of a line in a timeline
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Start(NamedTuple):
    """Seconds from the command."""

    answer: float  # that it starts: 503 with a reason
    ready: float
    token: float  # the first of a stream
    cpu: float  # of all processes, until then


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def cpu_seconds(process: int) -> float:
    """Of a process and its children, those that live."""
    ticks = os.sysconf("SC_CLK_TCK")
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    used = sum(map(int, fields[11:15])) / ticks  # its own, and of children that ended
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return used + sum(cpu_seconds(int(child)) for child in children)


def health(port: int) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def first_token(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    body = json.dumps({"prompt": "The sky is", "max_tokens": 4, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    line = connection.getresponse().readline()
    if not line.startswith(b"data: {"):
        raise SystemExit(f"no token came: {line!r}")
    connection.close()


def print_times(lines: Iterable[bytes], begun: float) -> None:
    """Print each line when it comes, with the seconds since `begun`."""
    for line in lines:
        print(f"{time.monotonic() - begun:7.2f}  {line.decode(errors='replace').rstrip()[:LINE_WIDTH]}", flush=True)


def measure(command: Sequence[str], has_timeline: bool = False) -> Start:
    port, begun = free_port(), time.monotonic()
    output = subprocess.PIPE if has_timeline else subprocess.DEVNULL
    running = subprocess.Popen([*command, "--port", str(port)], stderr=output, stdout=subprocess.DEVNULL)
    if running.stderr is not None:
        Thread(target=print_times, args=(running.stderr, begun), daemon=True).start()
    try:
        answer: float | None = None
        while (status := health(port)) != 200:
            since = time.monotonic() - begun
            if status is not None and answer is None:
                answer = since
            if running.poll() is not None or since > LIMIT_S:
                raise SystemExit(f"{shlex.join(command)} did not start")
            time.sleep(POLL_S)
        ready = time.monotonic() - begun
        first_token(port)
        return Start(answer or ready, ready, time.monotonic() - begun, cpu_seconds(running.pid))
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait()


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
    if given.random is None:
        compare(given, [])
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(given, ["--model", write_model(f"random:{given.random}", Path(folder) / "model")])


def compare(given: argparse.Namespace, model: list[str]) -> None:
    level = ["--log-level", "debug"] if given.timeline else []
    commands = {"quire": [sys.executable, "-m", "quire"]}
    commands |= {name: shlex.split(rest) for name, _, rest in (peer.partition("=") for peer in given.peer)}
    flags = [*model, *shlex.split(given.args), *level]
    commands = {name: [*command, "serve", *flags] for name, command in commands.items()}
    found: dict[str, list[Start]] = {name: [] for name in commands}
    for number in range(given.rounds + (not given.cold)):
        for name, command in commands.items():
            start = measure_cold(command, given.timeline) if given.cold else measure(command, given.timeline)
            if number or given.cold:
                found[name].append(start)
    print(f"median of {given.rounds}, seconds; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'':12} {'answers':>8} {'ready':>8} {'token':>8} {'CPU':>8}")
    for name, starts in found.items():
        medians = [statistics.median(part) for part in zip(*starts, strict=True)]
        print(f"{name:12} " + " ".join(f"{median:8.2f}" for median in medians))


if __name__ == "__main__":
    main()
