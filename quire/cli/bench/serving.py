"""`quire bench serving`: load on a server that is already running."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

LOAD, REQUEST, OUT = "Load", "Requests", "Output"


def serving(
    url: Annotated[str, typer.Argument(help="Any OpenAI-compatible server, as in http://127.0.0.1:8000.")],
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests at once, each stream sending one after the other.  [default: 1,8,32]", metavar="N,...",
            rich_help_panel=LOAD, show_default=False,
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(help="Requests per second, at random times (Poisson).", metavar="R,...", rich_help_panel=LOAD),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, rich_help_panel=LOAD, show_default=False,
            help="Requests in each run.  [default: 3 for each stream, at least 8; 64 with --request-rate]",
        ),
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(min=0.1, help="Cut a run off after this time.", rich_help_panel=LOAD)
    ] = 300.0,
    warm_up: Annotated[int, typer.Option(min=0, help="Unmeasured requests before.", rich_help_panel=LOAD)] = 2,
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
        bool, typer.Option(help="Send ignore_eos, for answers of full length.", rich_help_panel=REQUEST)
    ] = True,
    extra: Annotated[
        str, typer.Option(help="Fields added to every body.", metavar="JSON", rich_help_panel=REQUEST)
    ] = "{}",
    model: Annotated[
        str, typer.Option(help="By default the first of /v1/models.", rich_help_panel=REQUEST, show_default=False)
    ] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=REQUEST, show_default=False, help="Server's key.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without a byte until a request fails.", rich_help_panel=REQUEST)
    ] = 120.0,
    seed: Annotated[
        int, typer.Option(help="Seed of arrivals, and of prompts with --reuse-prompts.", rich_help_panel=REQUEST)
    ] = 0,
    reuse_prompts: Annotated[
        bool,
        typer.Option(
            "--reuse-prompts", rich_help_panel=REQUEST,
            help="Send the same prompts in every run of a seed, which the server may have cached. New ones by default.",
        ),
    ] = False,
    good_first_token_ms: Annotated[
        float, typer.Option(min=0, rich_help_panel=OUT, help="A good answer's first token comes sooner.")
    ] = 500.0,
    good_per_token_ms: Annotated[
        float, typer.Option(min=0, rich_help_panel=OUT, help="A good answer takes less for each further token.")
    ] = 25.0,
    json: Annotated[
        Path | None, typer.Option(help="Write the results to this file too.", metavar="FILE", rich_help_panel=OUT)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them into this SVG file.", metavar="FILE", rich_help_panel=OUT)
    ] = None,
) -> None:  # fmt: skip
    """Measure a server over HTTP at several loads: tokens per second, latencies, pauses, share of good answers."""
    from quire.cli.bench.serving_client import Sampling, Server  # with what is slow to import
    from quire.cli.bench.serving_report import Goal
    from quire.cli.bench.serving_run import Plan, json_object, measure, shapes

    server = Server(url, api_key=api_key, is_chat=chat, timeout_s=timeout)
    server.model = model
    plan = Plan(
        shapes=shapes(concurrency, request_rate),
        num_requests=requests,
        max_seconds=max_seconds,
        prompt_tokens=prompt_tokens,
        shared_words=shared_prefix,
        sampling=Sampling(output_tokens, temperature, ignore_eos, json_object(extra)),
        warm_up=warm_up,
        seed=seed,
        goal=Goal(good_first_token_ms, good_per_token_ms),
        salt="" if reuse_prompts else secrets.token_hex(8),
    )
    measure(server, plan, json, plot)
