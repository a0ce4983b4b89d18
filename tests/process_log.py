"""The log of a server that runs as processes. The output of a test that fails contains it."""

import subprocess
import threading
from collections import deque
from weakref import WeakSet

from tests.patience import WAIT_S

MAX_LINES = 20_000
MAX_SHOWN_LINES = 400
LAST_WORDS_S = 2.0  # a process that was stopped by a signal may hold the pipe for ever

_logs: WeakSet["ProcessLog"] = WeakSet()


class ProcessLog:
    """The last lines that a process and its children wrote to standard error.

    A thread reads them, a moment after they are written, so that the pipe does not fill."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._name = f"log of process {process.pid}"
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._num_unshown = 0
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        _logs.add(self)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            with self._lock:
                self._lines.append(line.rstrip("\n"))
                self._num_unshown += 1

    def lines(self) -> list[str]:
        """Those that have come so far."""
        with self._lock:
            return list(self._lines)

    def whole(self) -> str:
        """All lines, after the last process that writes to it has ended."""
        self._reader.join(WAIT_S)
        assert not self._reader.is_alive(), "a process still holds the log"
        return "\n".join(self.lines())

    def show(self) -> None:
        """Print the lines that no failure has shown yet, which pytest shows if the test fails."""
        self._reader.join(LAST_WORDS_S)
        name, lines = self.take_unshown()
        if lines:
            print(f"{name}:\n{lines}")

    def take_unshown(self) -> tuple[str, str]:
        """A title, and the last lines that have not been taken before."""
        with self._lock:
            lines = list(self._lines)[-min(self._num_unshown, MAX_SHOWN_LINES) :] if self._num_unshown else []
            self._num_unshown = 0
            return self._name, "\n".join(lines)


def unshown() -> list[tuple[str, str]]:
    """Of all processes: titles, and the lines that no failure has shown yet."""
    return [(name, lines) for name, lines in (log.take_unshown() for log in list(_logs)) if lines]
