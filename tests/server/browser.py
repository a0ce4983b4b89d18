"""A headless Chromium, driven over the WebDriver protocol."""

import base64
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests import web
from tests.patience import WAIT_S
from tests.server.processes import free_port

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
OTHER_HOST = "another-machine.test"  # a name of this machine that browsers do not trust, as they do loopback
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of an element's id

why_missing = (
    None
    if shutil.which("chromium") and shutil.which("chromedriver")
    else "needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
)


class Browser:
    """One window. `profile` is an empty folder."""

    def __init__(self, profile: Path, *, width: int = 1100, height: int = 800) -> None:
        port = free_port()
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = web.Client(base_url=f"http://127.0.0.1:{port}")
        try:
            wait_until(self._is_up)
            arguments = [
                *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}",
                f"--host-resolver-rules=MAP {OTHER_HOST} 127.0.0.1",
            ]  # fmt: skip
            options = {"binary": shutil.which("chromium"), "args": arguments}
            asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            self._session = "/session/" + self._ask("POST", "/session", asked)["sessionId"]
        except BaseException:
            self._driver.kill()
            raise

    def close(self) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._http.close()
            self._driver.terminate()
            self._driver.wait(WAIT_S)

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What `script` returns; `arguments` are its `arguments`."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """What a reader sees of the first such element; nothing where there is none."""
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def wait_for(self, selector: str, text: str) -> None:
        """Until the element shows `text`, among others."""
        wait_until(lambda: text in self.text(selector), lambda: f"{selector} shows {self.text(selector)!r}, not {text}")

    def click(self, selector: str) -> None:
        element = self._find(selector)
        self._ask("POST", f"{self._session}/element/{element}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type at the keyboard. \\ue007 is Enter, \\ue009 Control until \\ue000."""
        element = self._find(selector)
        self._ask("POST", f"{self._session}/element/{element}/value", {"text": text})

    def resize(self, width: int, height: int) -> None:
        self._ask("POST", f"{self._session}/window/rect", {"width": width, "height": height})

    def screenshot(self) -> bytes:
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def _find(self, selector: str) -> str:
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def _is_up(self) -> bool:
        try:
            return bool(self._ask("GET", "/status")["ready"])
        except httpx.TransportError:
            return False

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._http.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]


def wait_until(holds: Callable[[], Any], describe: Callable[[], str] = lambda: "it did not come true in time") -> None:
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until, describe()
        time.sleep(0.05)
