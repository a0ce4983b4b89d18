"""`quire bench serving`: its runs, and what it prints and writes."""

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire import __version__
from quire.cli.bench.load_options import LoadOptions
from quire.cli.bench.serving_client import Sampling, Server
from quire.cli.bench.serving_load import LoadRun, Prompts, Shape, run_load, words_for
from quire.cli.bench.serving_plot import plot as draw
from quire.cli.bench.serving_report import Goal, errors, numbers, print_table
from quire.errors import InvalidSetting, QuireError


class RequestsFailed(QuireError):
    """Some requests of the run were not answered."""


class LoadBench:
    """One run for each load of the options, against one server."""

    def __init__(self, url: str, options: LoadOptions) -> None:
        self._server = Server(url, api_key=options.api_key, is_chat=options.chat, timeout_s=options.timeout)
        self._server.model = options.model
        self._options = options
        self._shapes = shapes(options.concurrency, options.request_rate)
        extra = json_object(options.extra)
        self._sampling = Sampling(options.output_tokens, options.temperature, options.ignore_eos, extra)
        self._goal = Goal(options.good_first_token_ms, options.good_per_token_ms)
        self._salt = "" if options.reuse_prompts else secrets.token_hex(8)
        for file in (options.json, options.plot):
            if file is not None and not file.parent.is_dir():  # checked now, not after minutes of load
                raise InvalidSetting(f"{file} cannot be written: there is no folder {file.parent}")

    def measure(self) -> None:
        """Run, print the results, and write them to the files of the options."""
        server, options = self._server, self._options
        begun_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            runs = asyncio.run(self._run_all())
        except OSError as error:
            raise QuireError(f"{server.url} cannot be reached: {error}") from error
        results = {run.shape.name: numbers(run, self._goal) for run in runs}
        faults = {run.shape.name: errors(run) for run in runs if errors(run)}
        title = f"{server.model} at {server.url}: {options.prompt_tokens} tokens in, {options.output_tokens} out"
        prompts = f"those of seed {options.seed}: an earlier run may have left them cached"
        out = Console(file=sys.stdout, highlight=False)
        out.print(title)
        out.print(f"Prompts are {'new in this run' if self._salt else prompts}.")
        print_table(out, results, faults, self._goal)
        if options.json is not None:
            document = {**self._about(begun_at), "results": results, "errors": faults}
            options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if options.plot is not None:
            options.plot.write_text(draw(title, f"quire bench serving, {begun_at}", results), encoding="utf-8")
        num_failed = sum(int(found["errors"]) for found in results.values())
        if num_failed:
            num_requests = sum(int(found["requests"]) for found in results.values())
            raise RequestsFailed(f"{num_failed} of {num_requests} requests failed")

    def _about(self, begun_at: str) -> dict[str, Any]:
        return {
            "quire": __version__,
            "url": self._server.url,
            "model": self._server.model,
            "begun_at": begun_at,
            "route": "chat completions" if self._server.is_chat else "completions",
            "asked_prompt_tokens": self._options.prompt_tokens,
            "asked_output_tokens": self._options.output_tokens,
            "shared_prefix": self._options.shared_prefix,
            "seed": self._options.seed,
            "goal": self._goal._asdict(),
            "reused_prompts": not self._salt,
        }

    async def _run_all(self) -> list[LoadRun]:
        """One run for each shape, after requests that are not measured."""
        if not self._server.model:
            await self._server.find_model()
        words = await words_for(self._server, self._options.prompt_tokens, self._sampling)
        widest = max(self._shapes, key=lambda shape: shape.concurrency or 0)
        warm_up = Shape(concurrency=widest.concurrency or 1)
        await self._run(warm_up, words, "warm-up", self._options.warm_up, lambda: None)
        runs = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            for number, shape in enumerate(self._shapes):
                count = self._options.requests or shape.num_requests
                bar = progress.add_task(shape.name, total=count)
                ended = partial(progress.advance, bar)
                runs.append(await self._run(shape, words, str(number), count, ended))
        return runs

    async def _run(self, shape: Shape, words: int, name: str, count: int, ended: Callable[[], None]) -> LoadRun:
        prompts = Prompts(words, self._options.shared_prefix, f"{self._options.seed}/{name}", self._salt)
        conversations, within_s = prompts.conversations(count, self._sampling), self._options.max_seconds
        return await run_load(self._server, shape, conversations, within_s=within_s, seed=prompts.seed, ended=ended)


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
