"""Servers that exchange pages, as processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import web
from tests.chaos.server import Server, wait_until
from tests.group.members import Proxy
from tests.process_log import ProcessLog
from tests.server.processes import free_port
from tests.tiny_chat_model import SIZES

SECRET = "a secret that the tests share"
OPTIONS = SIZES | {"peer_min_tokens": 16, "host_cache_gib": 0.01, "restart_after_s": 60}


class PeerServer(Server):
    """`quire serve` with a role, or without."""

    def __init__(self, model: str, cache_dir: Path, role: str | None, secret: str = SECRET, **options: Any) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        roles = {} if role is None else {"role": role}
        settings = OPTIONS | roles | {"port": port, "cache_dir": cache_dir} | options
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", model, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "QUIRE_PEER_SECRET": secret, "JAX_PLATFORMS": "cpu"},
        )
        self.log = ProcessLog(self.process)

    def answer(self, number: int, **fields: Any) -> str:
        answer = web.post(f"{self.url}/v1/completions", json=body(number) | fields)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def count(self, name: str, **labels: str) -> float:
        """Of a metric that peers have, as the engine told it last."""
        written = ",".join(f'{key}="{value}"' for key, value in labels.items())
        return self.metrics().get(f"{name}{{{written}}}", 0.0)

    def pulls(self, outcome: str) -> float:
        return self.count("quire_peer_pulls", outcome=outcome)


def body(number: int) -> dict[str, Any]:
    """A prompt of 200 tokens or so, like no other from its first token on."""
    prompt = f"{number} " + " ".join(f"word {number * word}" for word in range(20))
    return {"prompt": prompt[:200], "max_tokens": 16, "temperature": number % 2, "seed": number}


class Pair:
    """A prefill server and a decode server; their connections go through a proxy."""

    def __init__(self, model: str, cache_dir: Path) -> None:
        self.link_port = free_port()
        self.model, self.cache_dir = model, cache_dir
        self.proxy = Proxy(self.link_port)
        self.prefill = PeerServer(model, cache_dir, "prefill", peer_address=f"127.0.0.1:{self.link_port}")
        self.prefill.wait_until_healthy()  # it has compiled what the other one needs
        self.decode = self.start_decode(model)

    def start_decode(self, model: str, **options: Any) -> PeerServer:
        decode = PeerServer(model, self.cache_dir, "decode", peers=f"127.0.0.1:{self.proxy.port}", **options)
        decode.wait_until_healthy()
        return decode

    def check(self, number: int, expected_outcome: str | None = None) -> None:
        """The decode server answers as the other one does, with pages from there or without."""
        before = self.decode.pulls(expected_outcome) if expected_outcome else 0
        assert self.decode.answer(number) == self.prefill.answer(number)
        if expected_outcome is not None:
            wait_until(lambda: self.decode.pulls(expected_outcome) > before)

    def wait_until_asked_again(self, number: int) -> None:
        """Until the peer has computed a prompt again, whatever pauses it was left alone for."""
        self.prefill.wait_until_healthy()
        before, numbers = self.decode.pulls("received"), iter(range(number, number + 1000))

        def is_received() -> bool:
            self.decode.answer(next(numbers))
            return self.decode.pulls("received") > before

        wait_until(is_received)

    def stop(self) -> None:
        self.decode.stop()
        self.prefill.stop()
        self.proxy.close()
