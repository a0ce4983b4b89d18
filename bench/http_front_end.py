"""Cost of the HTTP layer: front ends before an engine process whose device takes no time.

    python bench/http_front_end.py [--streams 1,64,256,1000] [--tokens 200] [--http-workers 1] [--step-ms 20]

First every stream takes tokens as fast as they come: tokens per second, and processor time of the front ends per
streamed token. Then steps take `--step-ms`, and each token says when it was made: how much later the client has it.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import cpu_seconds
from stream_client import NUM_TICKS, run_load, ticks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.core.limits import Limits
from quire.core.plan import StepPlan, StepResult
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.ipc.messages import Described
from quire.server.processes.serve import serve_engines
from quire.server.settings import ServerSettings

START_S = 30.0


class FreeDevice:
    """An executor that computes nothing. A step takes `step_s`; its token is the time at its end."""

    def __init__(self, step_s: float) -> None:
        self.platform, self.num_late, self.num_padding_tokens, self.num_unfinished = "none", 0, 0, 0
        self._step_s = step_s
        self._next_s = 0.0

    def submit(self, plan: StepPlan) -> "FreeStep":
        return FreeStep(self, plan)

    def wait(self) -> None:
        if self._step_s:
            now = time.monotonic()
            self._next_s = max(self._next_s + self._step_s, now)
            time.sleep(max(0.0, self._next_s - now))

    def reset(self) -> None: ...

    def check_device(self) -> None: ...


class FreeStep:
    def __init__(self, device: FreeDevice, plan: StepPlan) -> None:
        self._device = device
        self._plan = plan

    def result(self) -> StepResult:
        self._device.wait()
        token = ticks(time.time())
        return StepResult(self._plan.step, [[token] for chunk in self._plan.chunks if chunk.samples])


@dataclass(frozen=True)
class FreeEngine:
    """An EngineBuilder."""

    tokenizer: str
    streams: int
    step_s: float

    def __call__(self, describe: Callable[[Described], None]) -> Engine:
        describe(Described("free", self.tokenizer, (), {}))
        limits = Limits(
            page_size=64,
            num_pages=self.streams * 80 + 2,
            max_batch_size=self.streams,
            max_step_tokens=2 * self.streams + 64,
            max_batch_prefill_tokens=2 * self.streams + 64,
            max_sequence_tokens=64 * 80,
            prefix_caching=False,
        )
        return Engine(Scheduler(limits, time.monotonic), FreeDevice(self.step_s))


def make_tokenizer(folder: Path) -> None:
    """Each token is the text of its own number."""
    backend = Tokenizer(models.BPE(vocab={f"Ġ{number}": number for number in range(NUM_TICKS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def run_server(pipe: Any, engine: FreeEngine, workers: int) -> None:
    settings = ServerSettings(
        port=0, http_workers=workers, max_concurrent_requests=4 * engine.streams, log_level="warn"
    )
    serve_engines([engine], settings, announce=pipe.send)


@contextmanager
def running(folder: str, streams: int, workers: int = 1, step_s: float = 0.0) -> Iterator[tuple[int, int]]:
    """The port and the process of a server, which has been warmed up."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=run_server, args=(theirs, FreeEngine(folder, streams, step_s), workers))
    server.start()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the server did not start within {START_S} s")
        port = int(ours.recv().rsplit(":", 1)[1])
        time.sleep(0.5)
        run_load(port, min(streams, 16), 20)
        yield port, server.pid or 0
    finally:
        server.terminate()
        server.join(30)


def processes(server: int) -> tuple[list[int], list[int]]:
    """The engine and the front ends, which are children of the server and go by these names."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() for pid in children}
    engine, front_ends = ([pid for pid in names if names[pid] == wanted] for wanted in ("quire-engine", "quire-http"))
    return engine, front_ends


def measure(folder: str, streams: int, tokens: int, workers: int, step_s: float) -> dict[str, Any]:
    with running(folder, streams, workers, step_s) as (port, server):
        groups = processes(server)
        before = [sum(map(cpu_seconds, group)) for group in groups]
        load = run_load(port, streams, tokens)
        engine_s, front_end_s = (
            sum(map(cpu_seconds, group)) - used for group, used in zip(groups, before, strict=True)
        )
    return {
        "streams": streams,
        "http_workers": workers,
        "step_ms": step_s * 1000,
        "tokens": load.num_tokens,
        "tokens_per_s": round(load.num_tokens / load.took_s),
        "tokens_per_read": round(load.num_tokens / max(1, load.num_reads), 2),
        "front_end_cpu_us_per_token": round(front_end_s / load.num_tokens * 1e6, 1),
        "engine_cpu_us_per_token": round(engine_s / load.num_tokens * 1e6, 1),
        "delay_ms_p50": load.delay_ms(50),
        "delay_ms_p99": load.delay_ms(99),
        "errors": load.errors[:3],
        "num_errors": len(load.errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,256,1000")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--http-workers", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        for step_s in (0.0, asked.step_ms / 1000):
            for streams in map(int, asked.streams.split(",")):
                rows.append(measure(folder, streams, asked.tokens, asked.http_workers, step_s))
                print(json.dumps(rows[-1]), flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
