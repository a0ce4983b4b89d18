"""Measures a model through the Python API."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from quire.cli.bench import scenarios
from quire.cli.bench.scenarios import Work
from quire.errors import InvalidSetting
from quire.request import SamplingParams
from quire.settings.config import Config

if TYPE_CHECKING:
    from quire.llm import LLM

Metrics = dict[str, float]


class Timing(NamedTuple):
    seconds: float
    first_token_s: list[float]  # of each prompt
    output_tokens: int


def measure(llm: "LLM", work: Work) -> Timing:
    first: dict[int, float] = {}
    output_tokens = 0
    begun = time.perf_counter()
    sampling = SamplingParams(temperature=1.0)
    for delta in llm.stream(work.prompts, sampling, max_tokens=work.new_tokens, ignore_end=True, seed=0):
        first.setdefault(delta.index, time.perf_counter() - begun)
        output_tokens += len(delta.token_ids)
    seconds = time.perf_counter() - begun
    assert output_tokens == sum(work.new_tokens), f"{output_tokens} tokens came of {sum(work.new_tokens)}"
    return Timing(seconds, list(first.values()), output_tokens)


def summary(work: Work, timing: Timing) -> Metrics:
    prompt_tokens = sum(map(len, work.prompts))
    return {
        "seconds": timing.seconds,
        "output_tokens_per_s": timing.output_tokens / timing.seconds,
        "total_tokens_per_s": (prompt_tokens + timing.output_tokens) / timing.seconds,
        "first_token_ms": median(timing.first_token_s) * 1000,
    }


def decode(llm: "LLM", work: Work) -> Metrics:
    """Time of the tokens after the first."""
    vocab_size, length = llm.deployment.model.vocab_size, len(work.prompts[0])
    rows, tokens = len(work.prompts), work.new_tokens[0]
    measure(llm, scenarios.uniform(rows, length, 2, vocab_size, seed=1))
    one = measure(llm, scenarios.uniform(rows, length, 1, vocab_size, seed=2)).seconds
    step_s = (measure(llm, work).seconds - one) / (tokens - 1)
    return {"step_ms": step_s * 1000, "output_tokens_per_s": rows / step_s}


def first_token(llm: "LLM", work: Work) -> Metrics:
    measure(llm, scenarios.uniform(1, len(work.prompts[0]), 1, llm.deployment.model.vocab_size, seed=1))
    return {"first_token_ms": measure(llm, work).seconds * 1000}


def prefill(llm: "LLM", work: Work) -> Metrics:
    measure(llm, scenarios.uniform(1, len(work.prompts[0]), 1, llm.deployment.model.vocab_size, seed=1))
    timing = measure(llm, work)
    return {"seconds": timing.seconds, "prompt_tokens_per_s": sum(map(len, work.prompts)) / timing.seconds}


def together(llm: "LLM", work: Work) -> Metrics:
    measure(llm, scenarios.uniform(8, 64, 8, llm.deployment.model.vocab_size, seed=1))
    return summary(work, measure(llm, work))


def step_of_ladder(llm: "LLM", rows: int, prompt_tokens: int, new_tokens: int) -> Metrics:
    vocab_size = llm.deployment.model.vocab_size
    measure(llm, scenarios.uniform(rows, prompt_tokens, min(2, new_tokens), vocab_size, seed=1))
    work = scenarios.uniform(rows, prompt_tokens, new_tokens, vocab_size, seed=2)
    return summary(work, measure(llm, work))


def start(config: Config) -> Metrics:
    """Time from the start of a new process to its first token, with compiled programs from the cache."""
    code = (
        "from pathlib import Path, PosixPath, WindowsPath\n"
        "from quire import LLM, Config\n"
        f"llm = LLM(Config(**{asdict(config)!r}), progress=False)\n"
        "(completion,) = llm.generate([[11, 12, 13]], max_tokens=1)\n"
        "assert completion.error is None, completion.error\n"
    )
    seconds = []
    for _ in range(2):  # the first may compile
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
        seconds.append(time.perf_counter() - begun)
        if done.returncode:
            raise InvalidSetting(f"the model does not start: {done.stderr.strip().splitlines()[-1]}")
    return {"first_start_s": seconds[0], "second_start_s": seconds[1]}


HOW = {"decode": decode, "ttft": first_token, "prefill": prefill}  # by what a name begins with; others: together


def case(name: str) -> Callable[["LLM"], Metrics]:
    """The measurement of a case by its name; all but `start`, which needs no engine here."""
    make, how = scenarios.load(name), HOW.get(name.split("_", maxsplit=1)[0], together)
    return lambda llm: how(llm, make(llm.deployment.model.vocab_size))
