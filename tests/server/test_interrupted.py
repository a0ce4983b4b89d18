"""Ctrl-C and SIGTERM while a server starts: a terminal and a service manager send them to all of its processes."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.processes import WAIT_S, Served, wait_until
from tests.tiny_chat_model import write_tiny_chat_model

SIGNALS = [signal.SIGINT, signal.SIGTERM]
# The first child is the one that tracks what processes leave behind; those of the server follow.
MOMENTS: dict[str, Callable[[Served], bool]] = {
    "the first process exists": lambda served: len(served.children()) >= 1,
    "a process of the server exists": lambda served: len(served.children()) >= 2,
    "all processes exist": lambda served: len(served.children()) >= 3,
    "the engine process listens to its parent alone": lambda served: bool(served.named("quire-engine")),
    "the worker listens to its parent alone": lambda served: bool(served.named("quire-http")),
}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    write_tiny_chat_model(tmp_path)
    served = Served(tmp_path, f"builds_after={tmp_path / 'never'}")  # it starts until it is ended
    yield served
    served.stop()


@pytest.mark.parametrize("number", SIGNALS, ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_starts_ends_without_a_word_of_its_processes(
    served: Served, number: signal.Signals, moment: str
) -> None:
    wait_until(lambda: MOMENTS[moment](served))
    served.signal(number)
    status, _, errors = served.ended()
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 1
    assert status == 0


@pytest.mark.parametrize("number", SIGNALS, ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("module", ["quire.cli", "quire.server.settings", "quire.server.processes.supervisor"])
def test_the_command_is_quiet_while_it_imports(number: signal.Signals, module: str) -> None:
    """`-X importtime` says on standard error which module has just been imported."""
    command = [sys.executable, "-X", "importtime", "-m", "quire", "serve", "random:no-such-shape", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(f" {module}"):
            process.send_signal(number)
            break
    shown, errors = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in errors
    if process.returncode == 2:
        pytest.skip("it had found out that there is no such shape before it heard the signal")
    said = [line for line in errors.splitlines() if "import time:" not in line]
    # It may have come further than the import by then.
    assert [line.partition(" ")[2] for line in said] in ([], ["INFO stopped before the engine was ready"])
    assert shown == ""
    assert process.returncode in ((0,) if said else (-number, 128 + number))
