"""A server as processes, for tests."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests import web
from tests.patience import WAIT_S
from tests.process_log import ProcessLog


class Served:
    """A server's processes."""

    def __init__(self, folder: Path, *settings: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.serve_fake", str(folder), *settings],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=None if environment is None else os.environ | environment,
        )  # fmt: skip
        self.log = ProcessLog(self.process)

    def wait(self) -> "Served":
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.log.whole()
        return self

    def ask(self, body: dict, **options) -> httpx.Response:
        return web.post(f"{self.url}/v1/completions", json=body, **options)

    def wait_for_running(self, count: int) -> None:
        """Until so many sequences run, as the engine last told."""
        wait_until(lambda: f"\ntgi_batch_current_size {count}\n" in web.get(f"{self.url}/metrics").text)

    def children(self) -> list[tuple[int, str]]:
        """Those that have not ended while they are looked at."""
        children = map(int, _read_proc(f"{self.process.pid}/task/{self.process.pid}/children").split())
        return [(child, _read_proc(f"{child}/cmdline").replace("\0", " ")) for child in children if _exists(child)]

    def named(self, name: str) -> list[int]:
        """The server's processes of this name, oldest first."""
        return [pid for pid, _ in self.children() if _read_proc(f"{pid}/comm").strip() == name]

    def signal(self, number: int) -> None:
        """Send a signal to all processes, as a terminal does. One of them may end by it before the next gets it."""
        for pid in [self.process.pid, *(pid for pid, _ in self.children())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def engine_pid(self) -> int:
        return self.named("quire-engine")[-1]

    def ended(self) -> tuple[int, str, str]:
        """The exit code, the output and the log, once all of its processes have ended."""
        return self.process.wait(WAIT_S), self.process.stdout.read(), self.log.whole()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(WAIT_S)
        finally:
            self.log.show()


def free_port() -> int:
    """A port that stays free: the kernel gives those of this range to no connection and to no server, no other worker
    of these tests draws from this one's part of it, and none is drawn twice."""
    lowest_given = int(_read_proc("sys/net/ipv4/ip_local_port_range").split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.SystemRandom().randrange(
            max(1024, lowest_given - 10_000) + worker, max(11_024, lowest_given), num_workers
        )
        if port in _drawn:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _drawn.add(port)
            return port


_drawn: set[int] = set()


def _exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _read_proc(path: str) -> str:
    """Nothing of a process that has ended."""
    try:
        return Path("/proc", path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(holds: Callable[[], bool]) -> float:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < WAIT_S, "it did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - begun
