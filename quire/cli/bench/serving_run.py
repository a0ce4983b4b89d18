"""Load runs against one server, from a plan to what they showed."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire import __version__
from quire.cli.bench.serving_client import Sampling, Server
from quire.cli.bench.serving_load import Prompts, Run, Shape, run_load, words_for
from quire.cli.bench.serving_plot import plot as draw
from quire.cli.bench.serving_report import Goal, errors, numbers, print_table
from quire.errors import InvalidSetting, QuireError

REQUESTS_PER_STREAM, MIN_REQUESTS, REQUESTS_AT_RATE = 3, 8, 64


class RequestsFailed(QuireError):
    """Some requests of the run were not answered."""


@dataclass(frozen=True)
class Plan:
    """Everything a bench does to a server."""

    shapes: tuple[Shape, ...]
    num_requests: int | None
    max_seconds: float
    prompt_tokens: int
    shared_words: int
    sampling: Sampling
    warm_up: int
    seed: int
    salt: str  # of the prompts; "" for those that every run of the seed has
    goal: Goal = Goal()

    def prompts(self, words: int, run: str) -> Prompts:
        return Prompts(words, self.shared_words, f"{self.seed}/{run}", self.salt)

    def requests_of(self, shape: Shape) -> int:
        if self.num_requests is not None:
            return self.num_requests
        if shape.concurrency is None:
            return REQUESTS_AT_RATE
        return max(MIN_REQUESTS, REQUESTS_PER_STREAM * shape.concurrency)


async def bench_server(server: Server, plan: Plan, console: Console) -> list[Run]:
    """One run for each shape, after requests that are not measured."""
    if not server.model:
        await server.find_model()
    words = await words_for(server, plan.prompt_tokens, plan.sampling)
    if plan.warm_up:
        widest = max(plan.shapes, key=lambda shape: shape.concurrency or 0)
        shape = Shape(concurrency=widest.concurrency or 1)
        prompts = plan.prompts(words, "warm-up")
        warming = prompts.conversations(plan.warm_up, plan.sampling)
        await run_load(server, shape, warming, within_s=plan.max_seconds)
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for number, shape in enumerate(plan.shapes):
            count = plan.requests_of(shape)
            bar = progress.add_task(shape.name, total=count)
            prompts = plan.prompts(words, str(number))
            runs.append(
                await run_load(
                    server, shape, prompts.conversations(count, plan.sampling),
                    within_s=plan.max_seconds, seed=prompts.seed, ended=lambda _, bar=bar: progress.advance(bar),  # type: ignore[misc]
                )
            )  # fmt: skip
    return runs


def measure(server: Server, plan: Plan, json_file: Path | None, plot_file: Path | None) -> None:
    """Runs the plan, prints what it showed, and writes it to files where asked."""
    for file in (json_file, plot_file):
        if file is not None and not file.parent.is_dir():  # found out now, and not after minutes
            raise InvalidSetting(f"{file} cannot be written: there is no folder {file.parent}")
    begun_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    runs = asyncio.run(_bench(server, plan, Console(stderr=True)))
    results = {run.shape.name: numbers(run, plan.goal) for run in runs}
    faults = {run.shape.name: errors(run) for run in runs if errors(run)}
    about: dict[str, Any] = {
        "quire": __version__,
        "url": server.url,
        "model": server.model,
        "begun_at": begun_at,
        "route": "chat completions" if server.is_chat else "completions",
        "asked_prompt_tokens": plan.prompt_tokens,
        "asked_output_tokens": plan.sampling.output_tokens,
        "shared_prefix": plan.shared_words,
        "seed": plan.seed,
        "goal": plan.goal._asdict(),
        "reused_prompts": not plan.salt,
    }
    title = f"{server.model} at {server.url}: {plan.prompt_tokens} tokens in, {plan.sampling.output_tokens} out"
    out = Console(file=sys.stdout)
    out.print(title, highlight=False)
    if plan.salt:
        out.print("Prompts are new in this run.", highlight=False)
    else:
        out.print(f"Prompts are those of seed {plan.seed}: an earlier run may have left them cached.", highlight=False)
    print_table(out, results, faults, plan.goal)
    if json_file is not None:
        document = {**about, "results": results, "errors": faults}
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot_file.write_text(draw(title, f"quire bench serving, {begun_at}", results), encoding="utf-8")
    num_failed = sum(int(found["errors"]) for found in results.values())
    if num_failed:
        raise RequestsFailed(f"{num_failed} of {sum(int(f['requests']) for f in results.values())} requests failed")


async def _bench(server: Server, plan: Plan, console: Console) -> list[Run]:
    try:
        return await bench_server(server, plan, console)
    except OSError as error:
        raise QuireError(f"{server.url} cannot be reached: {error}") from error


def shapes(concurrency: str | None, request_rate: str | None) -> tuple[Shape, ...]:
    if concurrency is None and request_rate is None:
        concurrency = "1,8,32"
    streams = (Shape(concurrency=int(number)) for number in _numbers("--concurrency", concurrency))
    return (*streams, *(Shape(rate=number) for number in _numbers("--request-rate", request_rate)))


def _numbers(option: str, text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0 or (option == "--concurrency" and any(number % 1 for number in found)):
        raise InvalidSetting(f"{option} is {text!r}; it must be numbers above 0, like 1,8,32")
    return found


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidSetting(f'--extra is {text!r}; it must be a JSON object, like {{"top_p": 0.9}}')
    return found
