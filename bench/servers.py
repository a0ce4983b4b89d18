"""Servers that benchmarks start on this machine, and what can be asked of them."""

import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

QUIRE = [sys.executable, "-m", "quire"]
POLL_S, LIMIT_S, STOP_S = 0.02, 600.0, 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cpu_seconds(process: int) -> float:
    """Of a process and its living children, and of children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return used + sum(cpu_seconds(int(child)) for child in children)


class ServerProcess:
    """`command --port N` with a free port, stopped at the end of a `with` block."""

    def __init__(
        self, command: Sequence[str], output: IO[bytes] | int = subprocess.DEVNULL, env: dict[str, str] | None = None
    ) -> None:
        self.command, self.port, self.began_s = command, free_port(), time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdout=output, stderr=subprocess.STDOUT, env=env
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def health(self) -> int | None:
        """The status of /health; None where nothing answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError:
            return None
        finally:
            connection.close()

    def wait_until_ready(self, each_poll: Callable[[int | None], None] = lambda status: None) -> float:
        """Seconds from its start. `each_poll` gets every status before."""
        while (status := self.health()) != 200:
            each_poll(status)
            if self.process.poll() is not None or time.monotonic() - self.began_s > LIMIT_S:
                raise SystemExit(f"{shlex.join(self.command)} did not start")
            time.sleep(POLL_S)
        return time.monotonic() - self.began_s

    def stream(self, body: dict[str, Any]) -> list[float]:
        """Seconds from the request to each event of a streamed completion."""
        asked = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"content-type": "application/json"},
        )
        began_s = time.monotonic()
        with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
            return [time.monotonic() - began_s for line in answer if line.startswith(b"data: {")]

    def metrics(self, name: str) -> dict[str, float]:
        """Those whose name begins so, with their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_S)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
