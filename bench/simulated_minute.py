"""The first seconds of a server on a GPU that still compiles, on the real engine, scheduler and choice of programs and
a computed clock: how much padding there is, and how long tokens take.

    python bench/simulated_minute.py [--rate 12] [--seconds 8] [--seeds 12] [--first-run-ms 20]

The load is that of bench/first_minute.py. Steps take the time that those of an 8B model in bf16 take on one H200, by
the tokens of their program. When the server is ready it has the first programs, which have run, and `--ready` others;
`--lanes` are under way at a time, and `--per-second` are made. The first run of a program holds up the host. The last
line is of a server that has all programs and knows the good sizes of steps.
"""

import argparse
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future
from statistics import mean, median
from typing import Any, NamedTuple

import jax
from simulated_load import H200_8B, TOKEN, arrivals, percentile

from quire.core.limits import Limits
from quire.core.plan import StepPlan, StepResult
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.limits.step_times import StepLoad
from quire.executor.launch import launches_of
from quire.executor.programs.compiler import Compiler
from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import StepShape
from quire.executor.programs.programs import Programs
from quire.executor.programs.step_costs import MEASURED_TOKENS
from quire.executor.sample.sampler import NOTHING_ASKED
from quire.executor.shapes import Shapes
from quire.models.checkpoint import weights_like
from quire.models.registry import build_model

# Milliseconds of a step by the tokens of its program, of decodes alone and of others, sampling included.
DECODES_MS = {8: 4.4, 32: 4.8, 64: 5.15, 128: 6.1, 256: 8.3}
STEPS_MS = {8: 5.0, 64: 5.7, 128: 6.5, 256: 8.05, 320: 9.23, 384: 10.5, 448: 15.9, 512: 12.9, 640: 14.65, 768: 19.5}
STEPS_MS |= {896: 20.5, 1024: 22.1, 1280: 28.0, 1536: 37.7, 1792: 38.7, 2048: 43.9, 8448: 185.5}
SHAPES = Shapes(
    num_pages=27_648, page_size=32, num_slots=256, max_prefill_tokens=8192, max_sequence_tokens=8192, min_tokens=8,
    is_fine=True, specialised=True, max_fresh_sequences=8, shared_groups=(0,),
)  # fmt: skip
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip


def step_ms(shape: StepShape) -> float:
    """Between two sizes the time is on a line between theirs."""
    table = DECODES_MS if shape.decodes_only else STEPS_MS
    sizes = sorted(table)
    at = min(max(1, bisect_left(sizes, shape.tokens)), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return table[low] + (table[high] - table[low]) * (shape.tokens - low) / (high - low)


class Making(NamedTuple):
    until_s: float
    key: Key
    future: Future[Any]


class Pending(NamedTuple):
    device: "Device"
    plan: StepPlan
    until_s: float

    def result(self) -> StepResult:
        self.device.now_s = max(self.device.now_s, self.until_s)
        return StepResult(self.plan.step, [[TOKEN] for chunk in self.plan.chunks if chunk.samples])

    def sample(self, masks: dict[int, bytes]) -> None:
        raise NotImplementedError("no request of this load has a grammar")


class Device:
    """An executor whose host and device have a clock, and whose programs are made one by one."""

    platform, num_late, num_unfinished = "gpu", 0, 0

    def __init__(self, given: argparse.Namespace) -> None:
        self.now_s = self._free_s = 0.0  # of the host; and when the device has nothing left to do
        self.num_padding_tokens = self.num_first_runs = 0
        self._given = given
        self._first_run_s = given.first_run_ms / 1000
        self._position_us, self._pair_us = (float(H200_8B.split(",")[index]) for index in (2, 4))
        model = build_model(TINY)
        weights = weights_like(model, None, dtype="bfloat16", quantize="none")
        self.programs = Programs(Compiler(model, weights, SHAPES), threads=0, clock=self.clock)
        self._scheduler = self.programs.scheduler
        self._making: list[Making] = []
        next(self.programs.compile_all())
        for _ in range(len(self.programs.catalog.first) + given.ready):
            self._begin(0.0)
        self._end_those_made()
        self._scheduler.ran |= {*self.programs.catalog.first}
        self.programs.begin_serving()
        for lane in range(given.lanes):
            self._begin((lane + 1) / given.per_second)

    def have_all(self) -> None:
        """As a server that has been idle for long."""
        while taken := self._scheduler.take():
            self._making.append(Making(0.0, *taken))
        self.now_s = max((one.until_s for one in self._making), default=0.0)
        self._end_those_made()
        self.programs.advance()
        self._scheduler.ran |= {*self.programs.catalog.keys}
        sizes = (size for size in SHAPES.ladder.cut_sizes if size <= MEASURED_TOKENS)
        self.programs.step_costs.seconds |= {size: step_ms(StepShape(size)) for size in sizes}
        self.programs.measure_one(jax.numpy.zeros(()))  # type: ignore[arg-type]  # nothing is left to measure
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def submit(self, plan: StepPlan) -> Pending:
        self._end_those_made()
        self.programs.advance()
        (launch,) = launches_of(plan, SHAPES)
        num_tokens = launch.num_tokens
        decode = None if launch.num_prefills else self.programs.decode(num_tokens, 1)
        if decode is not None:
            shape, *runs = decode
        else:
            shape, run = self.programs.forward(launch.shape, launch.num_tiles)
            count = len(launch.sampled)
            runs = [run, *([self.programs.sample(count, NOTHING_ASKED)[1]] if count else [])]
        for one in runs:
            one()
        if self.now_s <= self._given.seconds:
            self.num_padding_tokens += shape.tokens - num_tokens
        load = StepLoad.of(plan)
        attention_us = self._position_us * load.decode_context + self._pair_us * load.prefill_pairs
        self._free_s = max(self.now_s, self._free_s) + step_ms(shape) / 1e3 + attention_us / 1e6
        return Pending(self, plan, self._free_s)

    def _begin(self, until_s: float) -> None:
        taken = self._scheduler.take()
        if taken is not None:
            self._making.append(Making(until_s, *taken))

    def _end_those_made(self) -> None:
        while self._making and self._making[0].until_s <= self.now_s:
            made = self._making.pop(0)
            made.future.set_result(self._program(made.key))
            if made.until_s:
                self._begin(made.until_s + self._given.lanes / self._given.per_second)

    def _program(self, key: Key) -> Callable[[], None]:
        def run() -> None:
            if key not in self._scheduler.ran:
                self.now_s += self._first_run_s
                self.num_first_runs += 1

        return run


class Measured(NamedTuple):
    padding: float
    first_runs: float
    first_ms: float
    first_p99_ms: float
    token_ms: float  # mean over the requests
    token_p50_ms: float
    token_p99_ms: float


def measure(given: argparse.Namespace, seed: int, has_all: bool) -> Measured:
    device = Device(given)
    if has_all:
        device.have_all()
    scheduler = Scheduler(Limits(32, 27_648, 256, 256 + 8192, 8192, 8192), device.clock)
    engine = Engine(scheduler, device, 1, max_step_s=0.024, clock=device.clock)  # type: ignore[arg-type]
    engine.step_limits.step_sizes = lambda: device.programs.step_sizes
    engine.step_limits.update_sizes()
    load = [one for one in arrivals(given.rate, given.seconds, 0.0, 1, seed) if one.at_s <= given.seconds]
    times: dict[int, list[float]] = {}
    left = load[::-1]
    while left or not engine.is_idle:
        if engine.is_idle:
            device.now_s = max(device.now_s, left[-1].at_s)
        while left and left[-1].at_s <= device.now_s:
            engine.add(left.pop().request)
        for update in engine.step().updates:
            times.setdefault(update.request_id, []).extend([device.now_s] * len(update.tokens))
    first = [1000 * (times[request.request_id][0] - at_s) for at_s, request in load]
    each = [1000 * (one[-1] - one[0]) / (len(one) - 1) for one in times.values() if len(one) > 1]
    device.programs.close()
    counts = float(device.num_padding_tokens), float(device.num_first_runs)
    return Measured(*counts, median(first), percentile(first, 0.99), mean(each), median(each), percentile(each, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals")
    parser.add_argument("--seeds", type=int, default=12, help="loads whose mean is shown")
    parser.add_argument("--first-run-ms", type=float, default=20.0)
    parser.add_argument("--ready", type=int, default=18, help="programs that are made beside the first")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--per-second", type=float, default=57 / 40)
    given = parser.parse_args()
    print("| | padding, tokens | first runs | first token p50 / p99, ms | per token mean / p50 / p99, ms |")
    print("|---|---:|---:|---:|---:|")
    for name, has_all in (("directly after ready", False), ("all programs there", True)):
        runs = [measure(given, seed, has_all) for seed in range(1, given.seeds + 1)]
        of = Measured(*(mean(values) for values in zip(*runs, strict=True)))
        print(
            f"| {name} | {of.padding:,.0f} | {of.first_runs:.1f} | {of.first_ms:.1f} / {of.first_p99_ms:.0f} "
            f"| {of.token_ms:.2f} / {of.token_p50_ms:.2f} / {of.token_p99_ms:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
