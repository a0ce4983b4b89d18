"""The wait of scrapes of /metrics beside streams that are opened all at once, with a device that takes no time.

    python bench/scrapes.py [--streams 256] [--tokens 100] [--rounds 4] [--beside OLD_CHECKOUT]

Another process opens a connection for each scrape. With `--beside` the server of another checkout of Quire is measured
as well, in turns, so that both meet the same machine.
"""

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from http_front_end import make_tokenizer, running
from stream_client import run_load

INTERVAL_S = 0.01  # between a scrape's end and the next


def scrape(port: int) -> float:
    """Seconds from the connection's start to the answer's end."""
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        first = line.recv(1 << 18)
        if not first.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a scrape was answered with {first[:200]!r}")
        while line.recv(1 << 18):
            pass
    return time.monotonic() - begun


def keep_scraping(port: int, pipe: Any) -> None:
    """Scrape until the other end says so, and send the waits."""
    waits: list[float] = []
    while not pipe.poll(INTERVAL_S):
        waits.append(scrape(port))
    pipe.send(waits)


def measure(streams: int, tokens: int) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        with running(folder, streams) as (port, _):
            near, far = spawn.Pipe()
            scraper = spawn.Process(target=keep_scraping, args=(port, far))
            scraper.start()
            time.sleep(0.5)
            load = run_load(port, streams, tokens)
            near.send(None)
            waits = sorted(near.recv())
            scraper.join()
    return {
        "scrapes": len(waits),
        "wait_ms_p50": round(waits[len(waits) // 2] * 1000, 1),
        "wait_ms_p99": round(waits[len(waits) * 99 // 100] * 1000, 1),
        "wait_ms_longest": round(waits[-1] * 1000, 1),
        "tokens_per_s": round(load.num_tokens / load.took_s),
        "errors": load.errors[:3],
    }


def measure_checkout(checkout: str, streams: int, tokens: int) -> dict[str, Any]:
    """One round with the server of `checkout`, in a process of its own."""
    command = [sys.executable, __file__, "--one", "--streams", str(streams), "--tokens", str(tokens)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": checkout}, check=True, stdout=subprocess.PIPE, text=True
    )
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--beside", help="another checkout of Quire")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.streams, asked.tokens)))
        return
    here = str(Path(__file__).resolve().parents[1])
    checkouts = {"this": here} | ({} if asked.beside is None else {"beside": str(Path(asked.beside).resolve())})
    for number in range(asked.rounds):
        for name, checkout in list(checkouts.items())[:: 1 if number % 2 else -1]:
            row = measure_checkout(checkout, asked.streams, asked.tokens)
            print(json.dumps({"checkout": name, "streams": asked.streams} | row), flush=True)


if __name__ == "__main__":
    main()
