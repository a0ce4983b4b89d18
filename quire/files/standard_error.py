"""Standard error, for what need not be seen: where it cannot be written, as on a full disk, the work goes on."""

import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class _Suppressing:
    """A stream that drops what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def standard_error() -> TextIO | None:
    """The stream as it is now; None in a process that has none."""
    return None if sys.stderr is None else cast(TextIO, _Suppressing(sys.stderr))


def show(line: str) -> None:
    """Print a line there."""
    stream = standard_error()
    if stream is not None:
        print(line, file=stream, flush=True)
