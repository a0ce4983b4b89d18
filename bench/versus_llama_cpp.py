"""Quire's server and llama.cpp's on the same file, side by side: time to first token and tokens per second over HTTP.

    python bench/versus_llama_cpp.py --llama-server PATH [--llama-cpp-python PYTHON] [--streams 1,8,32]
    python bench/versus_llama_cpp.py --llama-server PATH --streams 1 --requests 3 --prompt-tokens 2000 --new-tokens 8
    python bench/versus_llama_cpp.py --llama-server PATH --streams 8 --requests 16 --prompt-tokens 1530 --shared 0.98

llama-server comes out of the source package of llama-cpp-python, or out of a clone of llama.cpp:

    pip download --no-deps llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_UI=OFF \\
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
    cmake --build build --target llama-server        # then: --llama-server build/bin/llama-server

Where the processor lists AMX and the system does not let programs use it, as in many virtual machines, that server ends
with SIGILL. One without AMX is made by the flags -DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON
-DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON.

`--llama-cpp-python` is the Python of an environment with `pip install 'llama-cpp-python[server]'`. Any other server is
a peer too: `--peer 'NAME=COMMAND'`, with {port} and {model} in the command. `--quire-args` go to `quire serve`; given
more than once, each is a server of its own.

All servers are started one after the other and stay; idle ones take no processor time. The loads then go round: every
server at one number of streams, then at the next, `--repeat` times, the median being what is shown. With `--shared`
prompts begin alike; the first of a load is sent alone before it, so that a server can have it in its cache.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from quire.cli.bench.serving_client import Sampling, Server
from quire.cli.bench.serving_load import Prompts, Shape, run_load, words_for
from quire.cli.bench.serving_report import Goal, numbers

METRICS = ("output_tokens_per_s", "first_token_ms_p50", "inter_token_ms_p50", "errors", "short_answers")
START_S, RETRY_S, STOP_S, LOAD_S = 300.0, 0.02, 15.0, 600.0
MAX_STREAMS = 32
WARM_UP_TOKENS = 4096  # of prompts, at most


@dataclass(frozen=True)
class Lengths:
    """Tokens of requests."""

    prompt: int
    answer: int
    shared: float = 0.0  # the share of a prompt that all have in common


@dataclass
class Peer:
    """A server that this process started."""

    name: str
    command: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    first_token_s: float = 0.0  # since its process began
    words: int = 0
    results: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # of each run, by load

    @property
    def server(self) -> Server:
        return Server(f"http://127.0.0.1:{self.port}", timeout_s=LOAD_S)

    async def start(self, log: Path) -> None:
        if (await self.server.send("Hello", Sampling(1))).error != "refused":
            raise SystemExit(f"something answers on port {self.port} already; --port names another")
        begun = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                shlex.split(self.command), stdout=out, stderr=out, start_new_session=True, cwd=log.parent
            )
        server = self.server
        server.model = "default"  # nobody minds, and asking would take time
        while (asked := await server.send("Hello, my name is", Sampling(2))).error is not None:
            if self.process.poll() is not None or time.monotonic() - begun > START_S:
                raise SystemExit(f"{self.name} does not start ({asked.detail}); its output is in {log}")
            if asked.error == "HTTP 404":
                await server.find_model()  # this one does mind
            await asyncio.sleep(RETRY_S)
        self.first_token_s = asked.arrivals_s[0] - begun

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def load(self, streams: int, num_requests: int, seed: str, lengths: Lengths) -> dict[str, float]:
        server = self.server
        await server.find_model()
        sampling = Sampling(lengths.answer)
        self.words = self.words or await words_for(server, lengths.prompt, sampling)
        shared = round(lengths.shared * self.words)
        if shared:
            (text,) = Prompts(self.words, shared, "first", seed).texts(1)
            await server.send(text, sampling._replace(output_tokens=1))
        asked = Prompts(self.words, shared, seed, seed).conversations(num_requests, sampling)
        return numbers(await run_load(server, Shape(concurrency=streams), asked, within_s=LOAD_S), Goal())


async def compare(peers: list[Peer], streams: list[int], requests: list[int], repeat: int, lengths: Lengths) -> None:
    for peer in peers:
        await peer.start(Path(f"/tmp/versus-{os.getpid()}-{peer.port}.log"))
        print(f"{peer.name}: first token {peer.first_token_s:.1f} s after its start", file=sys.stderr)
    first = min(8, max(streams), max(1, WARM_UP_TOKENS // lengths.prompt))  # what runs for the first time takes longer
    for peer in peers:
        await peer.load(first, first, "warm-up", replace(lengths, answer=2))
    for wanted, count in zip(streams, requests, strict=True):
        for turn in range(repeat):
            for peer in peers if turn % 2 == 0 else peers[::-1]:
                found = await peer.load(wanted, count, f"{wanted}/{turn}", lengths)
                peer.results.setdefault(f"{wanted} streams", []).append(found)
                shown = ", ".join(f"{name} {found.get(name, float('nan')):.1f}" for name in METRICS)
                print(f"{peer.name}, {wanted} streams: {shown}", file=sys.stderr)


def report(peers: list[Peer]) -> dict[str, dict[str, dict[str, float]]]:
    """The medians, by load and server."""
    return {
        load: {
            peer.name: {name: median(run[name] for run in peer.results[load] if name in run) for name in METRICS}
            for peer in peers
        }
        for load in peers[0].results
    }


def print_table(peers: list[Peer]) -> None:
    print(f"{'streams':<12}{'server':<28}{'tokens/s':>10}{'ratio':>8}{'first token ms':>16}{'inter-token ms':>16}")
    for load, by_peer in report(peers).items():
        ours = by_peer[peers[0].name]["output_tokens_per_s"]
        for name, found in by_peer.items():
            speed = found["output_tokens_per_s"]
            print(
                f"{load:<12}{name:<28}{speed:>10.1f}{speed / ours:>8.2f}"
                f"{found['first_token_ms_p50']:>16.0f}{found['inter_token_ms_p50']:>16.1f}"
            )
    for peer in peers:
        print(f"{peer.name}: {peer.first_token_s:.2f} s from its start to its first token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", help="the binary")
    parser.add_argument("--llama-cpp-python", help="the Python that has it")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--quire-args", action="append", metavar="'--quantize int8'")
    parser.add_argument("--model", default=str(Path.home() / ".cache/quire/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--requests", default="4,16,32", help="in a run, for each number of streams")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shared", type=float, default=0.0, help="the share of prompts that is the same in all")
    parser.add_argument("--port", type=int, default=8230, help="the first; each server takes one")
    parser.add_argument("--json")
    asked = parser.parse_args()
    model, cores = shlex.quote(asked.model), len(os.sched_getaffinity(0))
    commands = {
        f"quire {arguments}".strip(): f"{sys.executable} -m quire serve {model} --port {{port}} {arguments}"
        for arguments in asked.quire_args or [""]
    }
    if asked.llama_server:
        commands["llama-server"] = (
            f"{asked.llama_server} -m {model} --host 127.0.0.1 --port {{port}} -t {cores} "
            f"-np {MAX_STREAMS} -c {MAX_STREAMS * 2 * (asked.prompt_tokens + asked.new_tokens)}"
        )
    if asked.llama_cpp_python:
        commands["llama-cpp-python"] = (
            f"{asked.llama_cpp_python} -m llama_cpp.server --model {model} --host 127.0.0.1 --port {{port}} "
            f"--n_threads {cores} --n_threads_batch {cores} --interrupt_requests false"
        )
    commands |= dict(peer.split("=", 1) for peer in asked.peer)
    peers = [
        Peer(name, command.replace("{port}", str(asked.port + number)).replace("{model}", model), asked.port + number)
        for number, (name, command) in enumerate(commands.items())
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # and take the servers along
    streams, requests = ([int(part) for part in text.split(",")] for text in (asked.streams, asked.requests))
    try:
        lengths = Lengths(asked.prompt_tokens, asked.new_tokens, asked.shared)
        asyncio.run(compare(peers, streams, requests[: len(streams)], asked.repeat, lengths))
    finally:
        for peer in peers:
            peer.stop()
    print_table(peers)
    if asked.json:
        starts = {peer.name: peer.first_token_s for peer in peers}
        document = {"medians": report(peers), "start_to_first_token_s": starts}
        Path(asked.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
