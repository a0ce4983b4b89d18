"""The processes of a group, and what can be done to them and to the connection between them."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests import web
from tests.chaos.server import Server
from tests.process_log import ProcessLog
from tests.server.processes import free_port

SECRET = "a secret that the tests share"


class Proxy:
    """Carries bytes between a member and its leader, until the connection is cut, or nothing passes any more."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._passes = threading.Event()
        self._passes.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            try:
                other = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                one.close()
                continue
            self._pairs.append((one, other))
            threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        ends = {one: other, other: one}
        try:
            while True:
                for source in select.select(list(ends), [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    self._passes.wait()
                    ends[source].sendall(data)
        except (OSError, ValueError):
            return
        finally:
            one.close()
            other.close()

    @property
    def num_open(self) -> int:
        """Connections that were carried since the last cut."""
        return len(self._pairs)

    def cut(self) -> None:
        """Close what is open. New connections are carried."""
        for pair in self._pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
        self._pairs.clear()

    def block(self) -> None:
        """Let nothing pass, as a firewall would that drops everything."""
        self._passes.clear()

    def unblock(self) -> None:
        self._passes.set()

    def close(self) -> None:
        self._listener.close()
        self.unblock()
        self.cut()


class Member(Server):
    """`quire serve` as a member of a group."""

    def __init__(self, rank: int, address: str, model: str, *options: str) -> None:
        self.rank = rank
        command = [sys.executable, "-m", "quire", "serve", model, "--group-size", "2", "--group-rank", str(rank)]
        self.process = subprocess.Popen(
            [*command, "--group-address", address, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "QUIRE_GROUP_SECRET": SECRET, "JAX_PLATFORMS": "cpu"},
        )
        self.log = ProcessLog(self.process)


class Group:
    """A leader and a follower, whose link goes through a proxy."""

    def __init__(self, model: str, *options: str) -> None:
        self._model, self._options = model, options
        self._link_port, self._port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.proxy = Proxy(self._link_port)
        self.leader = self.start_leader()
        self.follower = Member(1, f"127.0.0.1:{self.proxy.port}", model, *options)

    def start_leader(self) -> Member:
        self.leader = Member(0, f"127.0.0.1:{self._link_port}", self._model, "--port", str(self._port), *self._options)
        self.leader.url = self.url
        return self.leader

    def reason(self) -> str:
        """Why it is not ready; nothing where it is."""
        answer = web.get(f"{self.url}/health")
        return "" if answer.status_code == 200 else answer.json()["reason"]

    def kill_follower(self, number: int = signal.SIGKILL) -> None:
        assert self.follower.kill("quire-member", number=number)

    def stop(self) -> None:
        self.leader.stop()
        self.follower.stop()
        self.proxy.close()
