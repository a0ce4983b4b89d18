"""`quire bench serving`: load on a server that is already running."""

import asyncio
import json as json_format
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire import __version__
from quire.cli.bench.serving_client import Sampling, Server
from quire.cli.bench.serving_load import Prompts, Run, Shape, run_load, words_for
from quire.cli.bench.serving_plot import plot as draw
from quire.cli.bench.serving_report import errors, numbers, print_table
from quire.errors import InvalidSetting, QuireError

LOAD, REQUEST, OUT = "Load", "Requests", "Output"
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
        prompts = Prompts(words, plan.shared_words, f"{plan.seed}/warm-up")
        await run_load(server, shape, prompts, plan.warm_up, plan.sampling, within_s=plan.max_seconds)
    runs = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for number, shape in enumerate(plan.shapes):
            count = plan.requests_of(shape)
            bar = progress.add_task(shape.name, total=count)
            prompts = Prompts(words, plan.shared_words, f"{plan.seed}/{number}")
            runs.append(
                await run_load(
                    server, shape, prompts, count, plan.sampling,
                    within_s=plan.max_seconds, ended=lambda _, bar=bar: progress.advance(bar),  # type: ignore[misc]
                )
            )  # fmt: skip
    return runs


def serving(
    url: Annotated[str, typer.Argument(help="Any OpenAI-compatible server, as in http://127.0.0.1:8000.")],
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests at once, each stream asking again when it is answered.  [default: 1,8,32]", metavar="N,...",
            rich_help_panel=LOAD, show_default=False,
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(help="Requests a second, coming at random (Poisson).", metavar="R,...", rich_help_panel=LOAD),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, rich_help_panel=LOAD, show_default=False,
            help="Requests in each run.  [default: 3 for each stream, at least 8; 64 with --request-rate]",
        ),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="End a run after so long; cuts off what is under way.", rich_help_panel=LOAD)
    ] = 300.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, not measured.", rich_help_panel=LOAD)] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=REQUEST, help="Length of prompts.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=REQUEST, help="Length of answers.")] = 64,
    shared_prefix: Annotated[
        int, typer.Option(min=0, rich_help_panel=REQUEST, help="Words that all prompts begin with.")
    ] = 0,
    temperature: Annotated[float, typer.Option(min=0, rich_help_panel=REQUEST)] = 0.0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask /v1/chat/completions, not /v1/completions.", rich_help_panel=REQUEST)
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of full length; some servers do not know it.", rich_help_panel=REQUEST)
    ] = True,
    extra: Annotated[
        str, typer.Option(help="Fields added to every body.", metavar="JSON", rich_help_panel=REQUEST)
    ] = "{}",
    model: Annotated[
        str, typer.Option(help="What /v1/models says unless given.", rich_help_panel=REQUEST, show_default=False)
    ] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=REQUEST, show_default=False, help="For the server.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a byte that end a request.", rich_help_panel=REQUEST)
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="Other prompts, other arrivals.", rich_help_panel=REQUEST)] = 0,
    json: Annotated[
        Path | None, typer.Option(help="Write the results to this file too.", metavar="FILE", rich_help_panel=OUT)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them into this SVG file.", metavar="FILE", rich_help_panel=OUT)
    ] = None,
) -> None:  # fmt: skip
    """Measure a server over HTTP: tokens per second and latencies, at several loads."""
    server = Server(url, api_key=api_key, is_chat=chat, timeout_s=timeout)
    server.model = model
    plan = Plan(
        shapes=_shapes(concurrency, request_rate),
        num_requests=requests,
        max_seconds=max_seconds,
        prompt_tokens=prompt_tokens,
        shared_words=shared_prefix,
        sampling=Sampling(output_tokens, temperature, ignore_eos, _object(extra)),
        warm_up=warm_up,
        seed=seed,
    )
    begun_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    console = Console(stderr=True)
    runs = asyncio.run(_bench(server, plan, console))
    results = {run.shape.name: numbers(run) for run in runs}
    faults = {run.shape.name: errors(run) for run in runs if errors(run)}
    about: dict[str, Any] = {
        "quire": __version__, "url": url, "model": server.model, "begun_at": begun_at,
        "route": "chat completions" if chat else "completions", "asked_prompt_tokens": prompt_tokens,
        "asked_output_tokens": output_tokens, "shared_prefix": shared_prefix, "seed": seed,
    }  # fmt: skip
    title = f"{server.model} at {url}: {prompt_tokens} tokens in, {output_tokens} out"
    out = Console(file=sys.stdout)
    out.print(title, highlight=False)
    print_table(out, results, faults)
    if json is not None:
        document = {**about, "results": results, "errors": faults}
        json.write_text(json_format.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        plot.write_text(draw(title, f"quire bench serving, {begun_at}", results), encoding="utf-8")
    num_failed = sum(int(found["errors"]) for found in results.values())
    if num_failed:
        raise RequestsFailed(f"{num_failed} of {sum(int(f['requests']) for f in results.values())} requests failed")


async def _bench(server: Server, plan: Plan, console: Console) -> list[Run]:
    try:
        return await bench_server(server, plan, console)
    except OSError as error:
        raise QuireError(f"{server.url} cannot be reached: {error}") from error


def _shapes(concurrency: str | None, request_rate: str | None) -> tuple[Shape, ...]:
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


def _object(text: str) -> dict[str, Any]:
    try:
        found = json_format.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidSetting(f'--extra is {text!r}; it must be a JSON object, like {{"top_p": 0.9}}')
    return found
