"""`quire health`, and the check that the image runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import WAIT_S
from tests.server.processes import Served
from tests.server.test_tls import made

COMMANDS = (["quire", "health"], ["quire.server.health_check"])


class Place:
    """A machine as a container has it: with a temporary folder of its own."""

    def __init__(self, model_folder: Path, folder: Path) -> None:
        self._model_folder = model_folder
        self._environment = {"TMPDIR": str(folder)}
        self._served: list[Served] = []

    def serve(self, *settings: str) -> Served:
        self._served.append(Served(self._model_folder, *settings, environment=self._environment))
        return self._served[-1].wait()

    def check(self, command: list[str], *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", *command, *arguments],
            env=os.environ | self._environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout.strip() or done.stderr.strip()

    def stop(self) -> None:
        for one in self._served:
            one.stop()


@pytest.fixture
def place(model_folder: Path, tmp_path: Path) -> Iterator[Place]:
    one = Place(model_folder, tmp_path)
    yield one
    one.stop()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_server_is_found_whatever_its_port_and_address(place, command, host):
    assert place.check(command)[0] == 1, "nothing runs yet"
    served = place.serve(f"host={host}", "http_workers=2")
    assert place.check(command) == (0, served.url)
    served.stop()
    status, reason = place.check(command)
    assert (status, "no server of this user runs" in reason) == (1, True)


def test_a_server_with_a_certificate_of_its_own_is_asked_by_https(place, tmp_path):
    certificate = made(tmp_path, "server")
    served = place.serve(f"ssl_certfile={certificate.certfile}", f"ssl_keyfile={certificate.keyfile}", "api_key=key")
    assert served.url.startswith("https://")
    for command in COMMANDS:
        assert place.check(command) == (0, served.url)


def test_a_server_that_would_not_answer_is_not_well_and_the_reason_is_said(place):
    served = place.serve("max_engine_restarts=0")
    os.kill(served.engine_pid(), signal.SIGKILL)
    for command in COMMANDS:
        while (found := place.check(command))[0] == 0:
            pass  # until its end is noticed
        assert (found[0], "the engine process" in found[1]) == (1, True)


def test_of_several_servers_one_is_named(place):
    first, second = place.serve(), place.serve()
    for command in COMMANDS:
        status, reason = place.check(command)
        assert (status, first.url in reason, second.url in reason) == (1 if "." in command[0] else 2, True, True)
        assert place.check(command, second.url) == (0, second.url)
    os.kill(first.process.pid, signal.SIGKILL)  # which leaves its file behind
    first.process.wait(WAIT_S)
    assert place.check(COMMANDS[0]) == (0, second.url)


def test_an_address_that_is_none_is_refused(place):
    for address in ("ftp://127.0.0.1", "http://", "http://127.0.0.1:port"):
        status, reason = place.check(COMMANDS[0], address)
        assert (status, f"ADDRESS is {address!r}" in reason) == (2, True)


def test_a_server_that_can_leave_no_file_runs_and_says_so(place, tmp_path):
    (tmp_path / f"quire-servers-{os.getuid()}").write_text("not a folder")
    served = place.serve()
    assert place.check(COMMANDS[0])[0] == 1
    assert place.check(COMMANDS[0], served.url) == (0, served.url)
    served.stop()
    assert "`quire health` finds this server by its address only" in served.log.whole()
