"""Prompts that another server computes: their first token, and the speed of pages on their way.

    python bench/peers.py                      # the default model, prompts of 1,000 tokens
    python bench/peers.py --transport          # bytes alone: this transport and jax.experimental.transfer, 100 MiB

A prefill server and a decode server run on this machine, each with half of its cores, and a third one, with as many,
computes alone. Every prompt is new to all of them. The time to the first token is that of a stream with one client; the
longest pause is that between two tokens of another stream at the same server, while a long prompt comes.
"""

import argparse
import itertools
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import Future
from typing import Any

MIB = 2**20


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    def __init__(self, model: str, cores: list[int], *options: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "quire", "serve", model, "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"QUIRE_PEER_SECRET": SECRET},
        )

    def wait(self) -> "Server":
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return self
            except OSError:
                assert self.process.poll() is None, "the server has ended"
                time.sleep(0.2)

    def stream(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Seconds until each token."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        begun_s = time.monotonic()
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return [time.monotonic() - begun_s for line in answer if line.startswith(b"data: {")]

    def metrics(self, name: str) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(name)}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


SECRET = secrets.token_hex(16)


def prompt_of(length: int) -> list[int]:
    return [1000 + secrets.randbelow(20_000) for _ in range(length)]


def first_tokens(server: Server, length: int, rounds: int) -> list[float]:
    return [server.stream(prompt_of(length), 4)[0] for _ in range(rounds)]


def longest_pause(server: Server, length: int) -> float:
    """Between two tokens of a stream, while a long prompt comes to the same server."""
    found: list[list[float]] = []
    stream = threading.Thread(target=lambda: found.append(server.stream(prompt_of(20), 60)))
    stream.start()
    time.sleep(0.5)
    server.stream(prompt_of(length), 2)
    stream.join()
    times = found[0]
    return max(later - sooner for sooner, later in itertools.pairwise(times))


def compare(model: str, length: int, rounds: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    address = f"127.0.0.1:{free_port()}"
    limits = ["--max-total-tokens", str(max(2048, 2 * length))]
    role = {"prefill": ["--peer-address", address], "decode": ["--peers", address, "--peer-timeout-s", "60"]}
    servers: list[Server] = []

    def start(cores: list[int], *options: str) -> Server:
        servers.append(Server(model, cores, *limits, *options))
        return servers[-1].wait()

    try:
        alone = start(cores[:half])
        start(cores[-half:], "--role", "prefill", *role["prefill"])
        decode = start(cores[:half], "--role", "decode", *role["decode"])
        for one in (alone, decode):
            first_tokens(one, length, 1)  # not counted
        own, pulled = [], []
        for _ in range(rounds):  # in turns, since other work on the machine comes and goes
            own += first_tokens(alone, length, 1)
            pulled += first_tokens(decode, length, 1)
        print(f"{model}, prompts of {length} tokens, {rounds} rounds, {half} core(s) for each server")
        print(f"  first token, computed here  {1000 * statistics.median(own):8.0f} ms")
        ratio = statistics.median(own) / statistics.median(pulled)
        print(f"  first token, by a peer      {1000 * statistics.median(pulled):8.0f} ms   {ratio:.2f} x as fast")
        for name, value in decode.metrics("quire_peer").items():
            if value:
                print(f"  {name} {value:g}", flush=True)
        for name, one in (("computed here", alone), ("by a peer", decode)):
            pauses = [longest_pause(one, length) for _ in range(min(rounds, 3))]
            print(
                f"  longest pause of another stream, {name:>13} {1000 * statistics.median(pauses):8.0f} ms", flush=True
            )
    finally:
        for one in servers:
            one.stop()


def own_transport(num_bytes: int, rounds: int) -> list[float]:
    """Both ends in two processes: this one receives."""
    code = ("import sys, bench_peers as b; b.serve_pages(int(sys.argv[1]), sys.argv[2])").replace(
        "bench_peers", "peers"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(num_bytes), SECRET],
        cwd=os.path.dirname(os.path.abspath(__file__)), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    port = int(child.stdout.readline())
    from quire.peers.page_client import FetchRequest, PageClient

    client = PageClient([("127.0.0.1", port)], SECRET.encode(), {}, form_of(num_bytes))
    took = []
    for _ in range(rounds):
        begun_s = time.monotonic()
        fetch = client.fetch(FetchRequest(range(400), "", None, "", 0, 0), 60)
        assert fetch is not None
        assert fetch.result.result() is not None
        took.append(time.monotonic() - begun_s)
    child.kill()
    return took


def form_of(num_bytes: int) -> Any:
    from quire.peers.bundle import PageForm

    return PageForm(4, num_bytes // 100, (None,))


def serve_pages(num_bytes: int, secret: str) -> None:
    """The other end: it has computed everything."""
    from quire.peers.bundle import PageRange
    from quire.peers.prefill_server import PrefillServer

    data, form = memoryview(bytearray(os.urandom(num_bytes))), form_of(num_bytes)

    class Computed:
        range = PageRange((0,), 100)

        def read(self, begin: int, count: int) -> memoryview:
            return data[begin * form.page_bytes : (begin + count) * form.page_bytes]

    class Prefill:
        def __init__(self) -> None:
            self.result: Future[Any] = Future()
            self.result.set_result(Computed())

        def cancel(self) -> None:
            pass

    server = PrefillServer(("127.0.0.1", 0), secret.encode(), {}, form)
    print(server.port, flush=True)
    server.start(lambda ask: Prefill())
    time.sleep(3600)


JAX_SOURCE = """
import sys, time, numpy as np, jax
from jax.experimental import transfer
server = transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
array = jax.device_put(np.zeros(int(sys.argv[1]), np.uint8))
for number in range(int(sys.argv[2])):
    server.await_pull(number, [array])
print(server.address(), flush=True)
time.sleep(3600)
"""


def jax_transport(num_bytes: int, rounds: int) -> list[float]:
    import jax
    import numpy as np
    from jax.experimental import transfer

    child = subprocess.Popen(
        [sys.executable, "-c", JAX_SOURCE, str(num_bytes), str(rounds)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    device = jax.devices()[0]
    server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
    connection = server.connect(address)
    like = jax.ShapeDtypeStruct((num_bytes,), np.uint8, sharding=jax.sharding.SingleDeviceSharding(device))
    took = []
    for number in range(rounds):
        begun_s = time.monotonic()
        connection.pull(number, [like])[0].block_until_ready()
        took.append(time.monotonic() - begun_s)
    child.kill()
    return took


def compare_transports(num_bytes: int, rounds: int) -> None:
    for name, run in (("this transport", own_transport), ("jax.experimental.transfer", jax_transport)):
        took = run(num_bytes, rounds + 1)[1:]
        median = statistics.median(took)
        print(f"{name:>27}: {num_bytes // MIB} MiB in {1000 * median:.0f} ms, {num_bytes / median / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", action="store_true")
    given = parser.parse_args()
    if given.transport:
        compare_transports(100 * MIB, given.rounds)
    else:
        compare(given.model, given.tokens, given.rounds)


if __name__ == "__main__":
    main()
