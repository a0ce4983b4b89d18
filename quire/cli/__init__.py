"""The `quire` command. Heavy imports are made inside the commands, so that `quire --help` answers at once."""

import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from quire import __version__
from quire.cli.bench import bench
from quire.cli.chat import chat
from quire.cli.doctor import doctor
from quire.cli.generate import generate
from quire.cli.serve import serve
from quire.cli.tokenizer import tokenizer
from quire.errors import InvalidRequest, InvalidSetting, QuireError

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # exit codes

app = typer.Typer(
    name="quire",
    help="Serve large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(doctor)
app.add_typer(bench, name="bench")
app.add_typer(tokenizer, name="tokenizer")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit; what Quire refuses or fails at becomes one line on standard error."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="quire")
    except QuireError as error:
        print(f"quire: {error.message}", file=sys.stderr)
        sys.exit(BAD_INPUT if isinstance(error, InvalidRequest | InvalidSetting) else FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of standard output is gone
        sys.stderr.close()
        sys.exit(FAILED)
