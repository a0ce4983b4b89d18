"""Standard output: its failures are told apart from those of all other files."""

import io
import os
import sys
from typing import NoReturn

from quire.errors import OutputFailed


class StandardOutput(io.TextIOWrapper):
    """Raises OutputFailed where the device is full or broken. A reader that is gone stays a BrokenPipeError."""

    def __init__(self, replaced: io.TextIOWrapper) -> None:
        """An answer may have characters that a terminal has not: they are replaced."""
        super().__init__(
            replaced.buffer,
            replaced.encoding,
            "replace",
            line_buffering=replaced.line_buffering,
            write_through=replaced.write_through,
        )
        self._replaced = replaced  # which would close the buffer that both have, once nothing refers to it

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            _fail(error)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            _fail(error)


def open_output() -> None:
    """Begin to tell. What a test or a caller has put in the place of standard output stays."""
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = StandardOutput(sys.stdout)


def end_output() -> None:
    """Write what is left, or drop it where that cannot be: Python would print a traceback as it ends."""
    try:
        sys.stdout.flush()
    except (OSError, OutputFailed):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def _fail(error: OSError) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        raise error
    raise OutputFailed(f"standard output cannot be written: {error.strerror or error}") from error
