"""Requests that arrive on their own, on the real scheduler and a computed clock: what a rule of scheduling does.

    python bench/simulated_load.py [--rates 12,24,50] [--seconds 15] [--max-step-ms 24]

The load is that of bench/open_loop.py and the engine is the real one. A step takes so long for itself, for each decode,
for each position that a decode reads, for each prompt token and for each pair of a prompt token and a position that it
reads. The five numbers are those of an 8B model in bf16 on one H200, from the steps of a server under this load; what
its clients measured was within 15 % of this. A minute of load takes seconds.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import pairwise
from math import log
from typing import NamedTuple

from quire.core.limits import Limits
from quire.core.plan import Kind, StepPlan, StepResult
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.limits.step_times import StepLoad
from quire.request import Request, SamplingParams

H200_8B = "4200,12.5,0.033,21.9,0.0007"
GOOD_FIRST_S, GOOD_TOKEN_S = 0.5, 0.025
TOKEN = 100  # that every step samples


class Arrival(NamedTuple):
    at_s: float
    request: Request


class Pending(NamedTuple):
    device: "Device"
    plan: StepPlan

    def result(self) -> StepResult:
        load = StepLoad.of(self.plan)
        counts = (1, *load)
        self.device.now_s += sum(cost * count for cost, count in zip(self.device.costs, counts, strict=True)) / 1e6
        length = self.plan.burst
        tokens = [[TOKEN] * (length if chunk.kind is Kind.DECODE else 1) for chunk in self.plan.chunks if chunk.samples]
        return StepResult(self.plan.step, tokens)

    def sample(self, masks: dict[int, bytes]) -> None:
        raise NotImplementedError("no request of this load has a grammar")


class Device:
    """An executor whose results take the time of a formula on a clock of its own."""

    platform, num_late, num_padding_tokens, num_unfinished = "gpu", 0, 0, 0

    def __init__(self, costs: list[float]) -> None:
        """`costs`, in microseconds: of a step, then by the fields of `StepLoad`."""
        self.costs = costs
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def submit(self, plan: StepPlan) -> Pending:
        return Pending(self, plan)


def arrivals(rate: float, seconds: float, begin_s: float, first_id: int, seed: int) -> Iterator[Arrival]:
    """Those of one rate. The same seed gives the same prompts at every rate, so later rates find some in the cache."""
    chance, at_s = random.Random(seed), 0.0
    while at_s < seconds:
        at_s += chance.expovariate(rate)
        num_prompt = min(4096, max(16, round(chance.lognormvariate(log(500), 1.0))))
        num_answer = min(512, max(8, round(chance.lognormvariate(log(150), 0.7))))
        prompt = tuple(chance.randrange(10, 100_000) for _ in range(num_prompt))
        yield Arrival(begin_s + at_s, Request(first_id, prompt, num_answer, SamplingParams()))
        first_id += 1


class Simulation:
    """One server over all rates."""

    def __init__(self, costs: list[float], max_step_ms: float, rows: int) -> None:
        self.device = Device(costs)
        limits = Limits(32, 27_648, rows, rows + 8192, 8192, 8192)
        scheduler = Scheduler(limits, self.device.clock)
        self._engine = Engine(scheduler, self.device, 1, max_step_s=max_step_ms / 1000, clock=self.device.clock)  # type: ignore[arg-type]

    def run(self, load: list[Arrival]) -> dict[int, list[float]]:
        """The times of the tokens of each request."""
        times: dict[int, list[float]] = {}
        waiting = iter(load)
        following = next(waiting, None)
        while following is not None or not self._engine.is_idle:
            if self._engine.is_idle and following is not None:
                self.device.now_s = max(self.device.now_s, following.at_s)
            while following is not None and following.at_s <= self.device.now_s:
                self._engine.add(following.request)
                following = next(waiting, None)
            for update in self._engine.step().updates:
                times.setdefault(update.request_id, []).extend([self.device.now_s] * len(update.tokens))
        return times


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * share)]


def row(rate: float, load: list[Arrival], times: dict[int, list[float]]) -> str:
    first = [times[request.request_id][0] - at_s for at_s, request in load]
    told = [times[request.request_id] for _, request in load]
    each = [(one[-1] - one[0]) / max(1, len(one) - 1) for one in told]
    pauses = [after - before for one in told for before, after in pairwise(one)]
    good = sum(f < GOOD_FIRST_S and e < GOOD_TOKEN_S for f, e in zip(first, each, strict=True)) / len(first)
    columns = ((first, (0.5, 0.9, 0.99)), (each, (0.5, 0.99)), (pauses, (0.99, 1.0)))
    cells = [" / ".join(f"{percentile(values, share) * 1000:.1f}" for share in shares) for values, shares in columns]
    return f"| {rate:g} | {' | '.join(cells)} | {good:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="12,24,50", help="requests per second, one after the other")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals, for each rate")
    parser.add_argument("--max-step-ms", type=float, default=24.0)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--costs", default=H200_8B, help="µs of a step, decode, its position, prompt token, its pair")
    asked = parser.parse_args()
    simulation = Simulation([float(cost) for cost in asked.costs.split(",")], asked.max_step_ms, asked.rows)
    print("| requests/s | first token p50 / p90 / p99 | per token p50 / p99 | pause p99 / longest, ms | good |")
    print("|---:|---|---|---|---:|")
    first_id = 1
    for rate in map(float, asked.rates.split(",")):
        load = list(arrivals(rate, asked.seconds, simulation.device.now_s + 0.5, first_id, asked.seed))
        first_id += len(load)
        print(row(rate, load, simulation.run(load)), flush=True)


if __name__ == "__main__":
    main()
