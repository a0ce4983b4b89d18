"""`quire bench serving`: load on a server that is already running."""

from functools import partial
from typing import Annotated

import typer

from quire.cli.bench.load_options import LoadOptions
from quire.cli.settings import with_settings


@partial(with_settings, is_sourced=False)
def serving(
    options: LoadOptions,
    url: Annotated[str, typer.Argument(help="Any OpenAI-compatible server, as in http://127.0.0.1:8000.")],
) -> None:
    """Measure a server over HTTP at several loads: tokens per second, latencies, pauses, share of good answers."""
    from quire.cli.bench.serving_run import LoadBench  # imports that are slow

    LoadBench(url, options).measure()
