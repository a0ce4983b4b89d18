"""`quire bench`: measures the speed of a model on this machine."""

import json as json_format
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire import __version__
from quire.cli.bench.report import Results, comparison, read_results, table
from quire.cli.bench.scenarios import NAMES
from quire.cli.bench.serving import serving
from quire.cli.command import Command
from quire.cli.console import log_to_stderr
from quire.cli.settings import with_settings
from quire.errors import InvalidSetting
from quire.settings.config import Config

if TYPE_CHECKING:
    from quire.llm import LLM

LADDER = "Ladder"

bench = typer.Typer(help="Measure, and compare what was measured.", no_args_is_help=True)


@with_settings
def offline(
    config: Config,
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Any of {', '.join(NAMES)}, with any numbers. None: the ladder only.", metavar="[CASE]..."
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Prompts at once, as in 1,8,32.", metavar="N,...", rich_help_panel=LADDER)
    ] = "1,8",
    prompt_tokens: Annotated[
        str, typer.Option(help="Lengths of prompts.", metavar="N,...", rich_help_panel=LADDER)
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(help="Lengths of answers.", metavar="N,...", rich_help_panel=LADDER)
    ] = "64",
    json: Annotated[Path | None, typer.Option(help="Write the results to this file too.", metavar="FILE")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress and choices.")] = False,
) -> None:
    """Measure generation in this process: the cases named, or every combination of the ladder."""
    from quire.cli.bench.offline import case, start, step_of_ladder
    from quire.cli.bench.scenarios import ladder

    measures = {name: case(name) for name in cases or () if name != "start"}
    steps = [] if cases else list(ladder(_numbers(batch), _numbers(prompt_tokens), _numbers(output_tokens)))
    log_to_stderr(quiet)
    results: Results = {}
    about: dict[str, Any] = {"quire": __version__, "python": platform.python_version(), "model": config.model}
    if cases and "start" in cases:  # before this process takes the device
        _note(results, "start", start(config))
    if measures or steps:
        from quire.llm import LLM

        llm = LLM(config, progress=not quiet)
        about |= _about(llm)
        for name, measure in measures.items():
            _note(results, name, measure(llm))
        for step in steps:
            name = f"{step[0]} x {step[1]} + {step[2]}"
            _note(results, name, step_of_ladder(llm, *step))
        llm.close()
    print(table(results))
    if json is not None:
        json.write_text(json_format.dumps({**about, "results": results}, indent=2) + "\n", encoding="utf-8")


def compare(
    first: Annotated[Path, typer.Argument(help="A file that --json wrote.", exists=True, dir_okay=False)],
    second: Annotated[Path, typer.Argument(help="Another.", exists=True, dir_okay=False)],
) -> None:
    """Put two runs side by side; above 1× the second is better."""
    one, other = read_results(first), read_results(second)
    for name in sorted((one.keys() | other.keys()) - {"results"}):
        if one.get(name) != other.get(name):
            print(f"{name}: {one.get(name)} / {other.get(name)}")
    print(comparison(one["results"], other["results"]))


bench.command(cls=Command)(offline)
bench.command(cls=Command)(serving)
bench.command(cls=Command)(compare)


def _about(llm: "LLM") -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    settings = {choice.name: choice.value for choice in llm.deployment.choices}
    return {"jax": jax.__version__, "device": f"{device.platform} {device.device_kind}", "settings": settings}


def _note(results: Results, name: str, metrics: dict[str, float]) -> None:
    results[name] = metrics
    parts = ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
    typer.echo(f"{name}: {parts}", err=True)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InvalidSetting(f"{text!r} is not a list of whole numbers above 0, like 1,8,32")
    return numbers
