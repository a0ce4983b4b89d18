"""The `quire` command. Heavy imports are made inside the commands, so that `quire --help` answers at once."""

import io
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated

import typer

from quire import __version__
from quire.cli.command import Command, ServeCommand
from quire.cli.settings import forget_service_links
from quire.cli.standard_output import end_output, open_output
from quire.errors import InvalidRequest, InvalidSetting, QuireError
from quire.files.standard_error import show

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130  # exit codes

COMMANDS = ("serve", "generate", "chat", "doctor", "health", "bench", "tokenizer")  # each is in the module of its name


def exit_code(error: QuireError) -> int:
    return BAD_INPUT if isinstance(error, InvalidRequest | InvalidSetting) else FAILED


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command with these subcommands; imports their modules."""
    app = typer.Typer(
        name="quire",
        help="Serve large language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in names:
        command = getattr(import_module(f"quire.cli.{name}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(cls=ServeCommand if name == "serve" else Command)(command)
    return app


def _open_closed_streams() -> None:
    """Standard streams that this process was started without read nothing and write nowhere. Left closed, their numbers
    would be those of the next files, such as the engine's journal, and what libraries print would go there."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _run(asked: list[str], given: list[str]) -> None:
    try:
        make_app(asked or COMMANDS)(args=given, prog_name="quire")
    except SystemExit:
        sys.stdout.flush()  # now, where a failure can still be told
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit; what Quire refuses or fails at becomes one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    asked = [name for name in given[:1] if name in COMMANDS]  # the other subcommands are not imported
    _open_closed_streams()
    open_output()
    forget_service_links(os.environ)
    if isinstance(sys.stderr, io.TextIOWrapper):  # a message may have characters that a terminal has not
        sys.stderr.reconfigure(errors="replace")
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # here, where it is caught
        _run(asked, given)
    except QuireError as error:
        end_output()
        show(f"quire: {error.message}")
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        end_output()
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of standard output is gone
        end_output()
        sys.exit(FAILED)
