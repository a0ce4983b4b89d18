"""`quire serve`: a model over HTTP."""

from dataclasses import replace
from typing import Annotated

import typer

from quire.cli.settings import with_settings
from quire.config import Config
from quire.server.settings import ServerSettings


@with_settings
def serve(
    config: Config,
    settings: ServerSettings,
    served: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="What to serve: the same as --model.", show_default=False)
    ] = None,
) -> None:
    """Serve a model over HTTP: the OpenAI API and that of text-generation-inference."""
    if served is not None:
        config = replace(config, model=served)
    from quire.server.serve import serve as run

    run(config, settings)
