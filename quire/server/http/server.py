"""The HTTP server of one worker."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn

from quire.server.http.acceptor import Acceptor
from quire.server.http.connection import Connection
from quire.server.http.listener import BACKLOG
from quire.server.http.loading import Loading
from quire.server.settings import ServerSettings

if TYPE_CHECKING:
    from quire.server.service.service import Service

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Answers that it is not ready until a service is admitted, and drains when it is stopped."""

    def __init__(self, settings: ServerSettings) -> None:
        self.loading = Loading()
        super().__init__(
            uvicorn.Config(
                self.loading,
                http=Connection,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]  # parts of seconds work as well
                timeout_graceful_shutdown=int(settings.drain_s) + 2,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_keyfile_password=settings.ssl_keyfile_password,
            )
        )
        self._ssl_handshake_s = settings.ssl_handshake_s
        self._drain_s = settings.drain_s
        self._service: Service | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def admit(self, service: "Service") -> None:
        """New connections reach `service`; earlier ones are closed after their answer."""
        self._service = service
        if not self.config.loaded:
            self.config.load()
        from quire.server.http.app import make_app  # all routes, which the answer that the server starts does without

        self.config.loaded_app = make_app(service)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on open sockets, and give TLS handshakes a time limit, which uvicorn cannot."""
        limit_s = None if self.config.ssl is None else self._ssl_handshake_s
        self.servers = [
            Acceptor(sock, self._new_connection, self.config.ssl, limit_s)  # type: ignore[misc]  # closed like a server
            for sock in sockets or []
        ]
        self.started = True

    def _new_connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the supervisor handles signals."""
        yield

    def stop(self) -> None:
        if self._service is not None and self._draining is None:
            log.info("%s", self._farewell(self._service.num_streams))
            self._draining = asyncio.create_task(self._service.drain(self._drain_s))
        self.should_exit = True
        self._stopped.set()

    def _farewell(self, num_open: int) -> str:
        if not num_open:
            return "Stopping."
        what = "request" if num_open == 1 else "requests"
        return f"Finishing {num_open} {what}, up to {self._drain_s:g} s; Ctrl-C again quits."

    async def wait_until_stopped(self) -> None:
        await self._stopped.wait()
