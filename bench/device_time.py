"""Device time of a run by kernel, and the times at which the device is idle.

    python bench/device_time.py random:llama-3.1-8b --case ttft_8192,decode_b256 [--rows 16] [--quantize fp8]

Each case of `quire bench offline` runs once to warm up and once under JAX's profiler, which lengthens it a little.
Kernels are put together by name, without the number at its end. Copies count as kernels; between two it is idle.
"""

import argparse
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

from quire import LLM, Config
from quire.cli.bench import scenarios
from quire.cli.bench.scenarios import Work
from quire.request import SamplingParams

BEGUN, DONE = "quire_begun", "quire_done"  # what the host notes in the profile
LONG_IDLE_US = 20.0
NUM_PAIRS = 8  # of kernels between which the device is idle, those with most of it


class Kernel(NamedTuple):
    begun_ns: float
    ended_ns: float
    name: str


def run(llm: LLM, work: Work, seed: int) -> float:
    begun = time.perf_counter()
    with jax.profiler.TraceAnnotation(BEGUN):
        deltas = llm.stream(work.prompts, SamplingParams(), max_tokens=work.new_tokens, ignore_end=True, seed=seed)
    for _ in deltas:
        pass
    with jax.profiler.TraceAnnotation(DONE):
        return time.perf_counter() - begun


def profiled(run: Callable[[], float]) -> tuple[float, ProfileData]:
    """The result of `run`, and its profile."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            seconds = run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return seconds, ProfileData.from_file(str(path))


def kernels(profile: ProfileData) -> list[Kernel]:
    """In the order in which they began, with copies, which the device does beside them or between them."""
    found = [
        Kernel(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(found)


def noted_ns(profile: ProfileData, name: str) -> float | None:
    times = (
        event.start_ns
        for plane in profile.planes
        if plane.name.startswith("/host:CPU")
        for line in plane.lines
        for event in line.events
        if event.name == name
    )
    return next(times, None)


def kind(name: str) -> str:
    return re.sub(r"([._]\d+)+$", "", name)[:80]


def idle(ordered: list[Kernel]) -> Iterator[tuple[float, str, str]]:
    """(µs, what ended before it, what began after it)."""
    last = ordered[0]
    for kernel in ordered[1:]:
        if kernel.begun_ns > last.ended_ns:
            yield (kernel.begun_ns - last.ended_ns) / 1e3, kind(last.name), kind(kernel.name)
        if kernel.ended_ns > last.ended_ns:
            last = kernel


def report(profile: ProfileData, seconds: float, most: int) -> list[str]:
    ordered = kernels(profile)
    if not ordered:
        return ["the profile has no kernels: is this a GPU?"]
    spent: dict[str, list[float]] = defaultdict(list)
    for kernel in ordered:
        spent[kind(kernel.name)].append((kernel.ended_ns - kernel.begun_ns) / 1e3)
    pauses = list(idle(ordered))
    long = [pause for pause in pauses if pause[0] >= LONG_IDLE_US]
    span = (max(kernel.ended_ns for kernel in ordered) - ordered[0].begun_ns) / 1e6
    lines = [
        f"{seconds * 1e3:.2f} ms in all; from the first kernel to the end of the last {span:.2f} ms; idle in it "
        f"{sum(pause[0] for pause in pauses) / 1e3:.2f} ms, {len(long)} times for {LONG_IDLE_US:.0f} µs or more: "
        f"{sum(pause[0] for pause in long) / 1e3:.2f} ms"
    ]
    begun, done = noted_ns(profile, BEGUN), noted_ns(profile, DONE)
    if begun is not None and done is not None:
        before, after = (ordered[0].begun_ns - begun) / 1e6, (done - max(k.ended_ns for k in ordered)) / 1e6
        lines.append(f"before the first kernel {before:.2f} ms, after the last {after:.2f} ms")
    lines += [f"  idle {us:9.1f} µs between {before} and {after}" for us, before, after in sorted(long)[-6:]]
    between: dict[str, list[float]] = defaultdict(list)
    for us, earlier, later in pauses:
        between[f"{earlier} and {later}"].append(us)
    lines += table("idle between", between, NUM_PAIRS)
    return lines + table("kernel", spent, most)


def table(title: str, times: dict[str, list[float]], most: int) -> list[str]:
    """Lines of those that take the most, in µs."""
    lines = [f"| {title} | number | ms in all | µs each | median |", "|---|---:|---:|---:|---:|"]
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        mean = sum(each) / len(each)
        lines.append(f"| {name} | {len(each)} | {sum(each) / 1e3:.3f} | {mean:.2f} | {median(each):.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--case", default="ttft_8192", help="of `quire bench offline`; several with commas")
    parser.add_argument("--rows", type=int, default=16, help="so many kernels are listed, those that take most")
    parser.add_argument("--quantize")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--reproducible", action="store_true")
    given = parser.parse_args()
    loads = {case: scenarios.load(case) for case in given.case.split(",")}
    llm = LLM(
        Config(
            model=given.model,
            quantize=given.quantize,
            kv_cache_dtype=given.kv_cache_dtype,
            reproducible=given.reproducible,
        )
    )
    for case, make in loads.items():
        work = make(llm.deployment.model.vocab_size)
        # The same lengths with other tokens, so that nothing is found in the prefix cache.
        run(llm, Work([prompt[::-1] for prompt in work.prompts], work.new_tokens), seed=1)
        seconds, profile = profiled(partial(run, llm, work, 0))
        print(f"\n{case}", *report(profile, seconds, given.rows), sep="\n", flush=True)
    llm.close()


if __name__ == "__main__":
    main()
