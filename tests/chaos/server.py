"""A server as processes, and what can be done to it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests import web
from tests.patience import WAIT_S
from tests.process_log import ProcessLog


class Server:
    """Processes that serve until `stop`. What they log is in `log`."""

    def __init__(self, kind: str, folder: Path | str, **asked: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.serve", kind, str(folder), json.dumps(asked)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self.log = ProcessLog(self.process)

    def wait(self) -> "Server":
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.log.whole()
        return self

    def processes(self, name: str) -> list[int]:
        """Those of this name, oldest first: quire-engine, quire-http. Several engines have numbers behind it."""
        with contextlib.suppress(OSError):
            children = _read(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split()
            return [int(pid) for pid in children if _is_named(pid, name) and _state(pid) != "Z"]
        return []

    def all_processes(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [*map(int, _read(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split())]
        return []

    def kill(self, name: str, which: int = -1, number: int = signal.SIGKILL) -> bool:
        """Whether there was one to be killed."""
        found = self.processes(name)
        if not found:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[which % len(found)], number)
        return True

    def cpu_s(self) -> float:
        """Processor time of all its processes so far."""
        fields = [_stat(str(pid)) for pid in (self.process.pid, *self.all_processes())]
        return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")

    def num_files(self, pid: int | None = None) -> int:
        """That a process of it has open; the first one, which outlives all others, if not said otherwise."""
        return len(os.listdir(f"/proc/{pid or self.process.pid}/fd"))

    def metrics(self) -> dict[str, float]:
        text = web.get(f"{self.url}/metrics").text
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        }

    def num_arrived(self) -> float:
        """Requests so far, of a server with one HTTP worker."""
        return self.metrics()["tgi_request_count"]

    def wait_until_healthy(self) -> None:
        """Of several engines, all of them."""
        wait_until(lambda: self._holds(lambda: self._status("/health") == 200 and not self.troubles()))

    def troubles(self) -> dict[int, str]:
        """Of several engines, by number: why one does not answer. Any worker may be asked."""
        answer = web.get(f"{self.url}/health")
        states = answer.json()["engines"] if answer.status_code == 200 and answer.content else []
        return {one["engine"]: one["reason"] for one in states if one["reason"] is not None}

    def wait_until_idle(self) -> dict[str, float]:
        """Until nothing runs or waits, by numbers that the engine has told since; all pages are free or cached then."""
        self.wait_until_healthy()
        metrics: dict[str, float] = {}

        def is_idle() -> bool:
            nonlocal metrics
            found = self.metrics()  # not every worker may have heard of every engine yet
            metrics = totals(found)
            num_told = sum(name.startswith("tgi_queue_size") for name in found)
            keys = ("tgi_batch_current_size", "tgi_queue_size", "quire_pages_active")
            return num_told == metrics.get("quire_engine_up", 1) and all(metrics[key] == 0 for key in keys)

        wait_until(lambda: self._holds(is_idle))
        return metrics

    @staticmethod
    def _holds(condition: Callable[[], bool]) -> bool:
        """False also where the worker that is asked ends before its answer."""
        with contextlib.suppress(httpx.HTTPError):
            return condition()
        return False

    def _status(self, path: str) -> int:
        return web.get(self.url + path).status_code

    def logged(self, text: str) -> list[str]:
        """The lines that have come so far."""
        return [line for line in self.log.lines() if text in line]

    def wait_for_log(self, text: str, times: int = 1) -> None:
        wait_until(lambda: len(self.logged(text)) >= times)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(WAIT_S)
        finally:
            self.log.show()


def totals(metrics: dict[str, float]) -> dict[str, float]:
    """By name alone: sums over engines and other labels."""
    sums: dict[str, float] = {}
    for name, value in metrics.items():
        key = name.partition("{")[0]
        sums[key] = sums.get(key, 0.0) + value
    return sums


def wait_until(holds: Callable[[], bool]) -> float:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < WAIT_S, "it did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - begun


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _state(str(pid)) != "Z"
    return False


def _is_named(pid: str, name: str) -> bool:
    found = _read(f"/proc/{pid}/comm").strip()
    return found == name or found.rstrip("0123456789") == f"{name}-"


def _state(pid: str) -> str:
    return _stat(pid)[0]


def _stat(pid: str) -> list[str]:
    return _read(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
