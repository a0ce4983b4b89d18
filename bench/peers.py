"""Prompts that another server computes: their first token, and the speed of pages on their way.

    python bench/peers.py                      # the default model, prompts of 1,000 tokens
    python bench/peers.py --transport          # bytes alone: this transport and jax.experimental.transfer, 100 MiB

A prefill server and a decode server run on this machine, each with half of its cores, and a third one, with as many,
computes alone. Every prompt is new to all of them. The time to the first token is that of a stream with one client; the
longest pause is that between two tokens of another stream at the same server, while a long prompt comes.
"""

import argparse
import itertools
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from servers import QUIRE, ServerProcess, free_port

MIB = 2**20
SECRET = secrets.token_hex(16)
GREEDY = {"temperature": 0, "ignore_eos": True}


def token_times(server: ServerProcess, length: int, max_tokens: int) -> list[float]:
    """Seconds until each token after a new prompt of so many."""
    prompt = [1000 + secrets.randbelow(20_000) for _ in range(length)]
    return server.stream({"prompt": prompt, "max_tokens": max_tokens, **GREEDY})


def longest_pause(server: ServerProcess, length: int) -> float:
    """Between two tokens of a stream, while a long prompt comes to the same server."""
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(token_times, server, 20, 60)
        time.sleep(0.5)
        token_times(server, length, 2)
        return max(later - sooner for sooner, later in itertools.pairwise(stream.result()))


def compare(model: str, length: int, rounds: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    address = f"127.0.0.1:{free_port()}"
    prefill = "--role", "prefill", "--peer-address", address
    decode = "--role", "decode", "--peers", address, "--peer-timeout-s", "60"
    with ExitStack() as stack:

        def start(cores: list[int], *options: str) -> ServerProcess:
            limits = "--max-total-tokens", str(max(2048, 2 * length))
            command = ["taskset", "-c", ",".join(map(str, cores)), *QUIRE, "serve", model, *limits, *options]
            server = stack.enter_context(ServerProcess(command, env=os.environ | {"QUIRE_PEER_SECRET": SECRET}))
            server.wait_until_ready()
            return server

        alone, _, decoding = start(cores[:half]), start(cores[-half:], *prefill), start(cores[:half], *decode)
        servers = {"computed here": alone, "by a peer": decoding}
        first_s: dict[str, list[float]] = {name: [] for name in servers}
        for number in range(rounds + 1):  # in turns, since other work on the machine comes and goes
            for name, server in servers.items():
                took_s = token_times(server, length, 4)[0]
                if number:
                    first_s[name].append(took_s)
        print(f"{model}, prompts of {length} tokens, {rounds} rounds, {half} core(s) for each server")
        for name, times in first_s.items():
            print(f"  first token, {name:>13} {1000 * statistics.median(times):8.0f} ms")
        here_s, peer_s = map(statistics.median, first_s.values())
        print(f"  a peer is {here_s / peer_s:.2f} x as fast")
        for name, value in decoding.metrics("quire_peer").items():
            if value:
                print(f"  {name} {value:g}", flush=True)
        for name, server in servers.items():
            pauses = [longest_pause(server, length) for _ in range(min(rounds, 3))]
            print(f"  longest pause of another stream, {name:>13} {1000 * statistics.median(pauses):8.0f} ms")


def timed(rounds: int, call: Callable[[int], object]) -> list[float]:
    """Seconds of each call, of which the first is left out."""
    took_s = []
    for number in range(rounds + 1):
        began_s = time.monotonic()
        call(number)
        took_s.append(time.monotonic() - began_s)
    return took_s[1:]


def child(code: str, *arguments: object) -> tuple[subprocess.Popen[str], str]:
    """A process of Python code in this folder, and the line that it prints first."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=os.path.dirname(os.path.abspath(__file__)), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def form_of(num_bytes: int) -> Any:
    from quire.peers.bundle import PageForm

    return PageForm(4, num_bytes // 100, (None,))


def own_transport(num_bytes: int, rounds: int) -> list[float]:
    """Both ends in two processes: this one receives."""
    from quire.peers.page_client import FetchRequest, PageClient

    code = "import sys, peers; peers.serve_pages(int(sys.argv[1]), sys.argv[2])"
    process, port = child(code, num_bytes, SECRET)
    client = PageClient([("127.0.0.1", int(port))], SECRET.encode(), {}, form_of(num_bytes))

    def fetch(_: int) -> None:
        fetched = client.fetch(FetchRequest(range(400), "", None, "", 0, 0), 60)
        assert fetched is not None
        assert fetched.result.result() is not None

    took_s = timed(rounds, fetch)
    process.kill()
    return took_s


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

    process, address = child(JAX_SOURCE, num_bytes, rounds + 1)
    device = jax.devices()[0]
    server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
    connection = server.connect(address)
    like = jax.ShapeDtypeStruct((num_bytes,), np.uint8, sharding=jax.sharding.SingleDeviceSharding(device))
    took_s = timed(rounds, lambda number: connection.pull(number, [like])[0].block_until_ready())
    process.kill()
    return took_s


def compare_transports(num_bytes: int, rounds: int) -> None:
    for name, run in (("this transport", own_transport), ("jax.experimental.transfer", jax_transport)):
        median = statistics.median(run(num_bytes, rounds))
        print(f"{name:>27}: {num_bytes // MIB} MiB in {1000 * median:.0f} ms, {num_bytes / median / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transport", action="store_true")
    given = parser.parse_args()
    run = partial(compare_transports, 100 * MIB) if given.transport else partial(compare, given.model, given.tokens)
    run(given.rounds)


if __name__ == "__main__":
    main()
