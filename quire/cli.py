"""The `quire` command. Heavy imports are made inside the commands, so that `quire --help` answers at once."""

from typing import Annotated

import typer

from quire import __version__

app = typer.Typer(name="quire", help="Serve large language models.", no_args_is_help=True, add_completion=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


@app.command()
def serve() -> None:
    """Serve a model over HTTP (not built yet)."""
    typer.echo("quire serve: the HTTP server is not built yet; see README.md for what works today.", err=True)
    raise typer.Exit(code=1)


def main() -> None:
    app()
