"""Two servers of the fake model behind a real router, as processes."""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests import web
from tests.chaos.server import Server, wait_until
from tests.patience import WAIT_S
from tests.server.processes import free_port

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".venv-routers"
GUIDE = ROOT / "docs" / "operations" / "routers.md"


class Router(NamedTuple):
    """A router: the package on PyPI, and the command that starts it, as the guide has it."""

    name: str
    command: str

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def executable(self) -> list[str]:
        program, *more = self.command.split()
        return [str(self.folder / "bin" / program), *more]

    @property
    def flags(self) -> list[str]:
        """Those of the command in the guide, but for addresses, which a test has of its own."""
        text = GUIDE.read_text(encoding="utf-8").replace("\\\n", " ")
        (shown,) = re.findall(rf"^{re.escape(self.command)} (.*)$", text, re.MULTILINE)
        return shlex.split(re.sub(r"--(host|port) \S+|--worker-urls( http\S+)+", "", shown))


ROUTERS = (
    Router("sglang-router", "python -m sglang_router.launch_router"),
    Router("vllm-router", "vllm-router"),
)


def install(router: Router) -> None:
    """Make the router's environment unless it is there."""
    stamp = router.folder / ".installed"
    if stamp.is_file():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", router.folder], check=True)
    subprocess.run([router.folder / "bin" / "python", "-m", "pip", "install", "-q", router.name], check=True)
    stamp.touch()


class Fleet:
    """Servers and their router, until `stop`. `asked` as for Server; `flags` beside those of the guide."""

    def __init__(self, router: Router, model: Path, *flags: str, guided: bool = True, **asked: Any) -> None:
        self.servers = [Server("fake", model, **asked) for _ in range(2)]
        addresses = [server.wait().url for server in self.servers]
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        own = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # the router writes to it until stop
        self._process = subprocess.Popen(
            [*router.executable, *own, *(router.flags if guided else ()), *flags, "--worker-urls", *addresses,
             "--worker-startup-check-interval", "1"], stdout=self._log, stderr=self._log,
        )  # fmt: skip
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._said()
        try:
            return web.get(f"{self.url}/readiness").is_success and web.get(f"{self.url}/v1/models").is_success
        except httpx.HTTPError:
            return False

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def ask(self, body: dict[str, Any], path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return web.post(self.url + path, json={"model": "fake"} | body, **options)

    def counts(self) -> list[int]:
        """The requests of each server so far; of one that is gone, 0."""
        return [
            0 if one.process.poll() is not None else int(one.metrics()["tgi_request_count"]) for one in self.servers
        ]

    def busier(self) -> Server:
        counts = self.counts()
        return self.servers[counts.index(max(counts))]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        self._log.close()
        for server in self.servers:
            server.stop()
