"""Accepts connections."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_PER_TURN = 256  # a connection costs some 50 µs
PAUSE_S = 1.0  # after the system refused one, as where too many files are open


class Acceptor:
    """Accepts the connections of one listening socket, many in each turn of the event loop.

    uvloop accepts one in each. A turn may apply a step of all streams, so the last of a burst would wait for as many
    steps as there are connections before it. Owned by the event loop.
    """

    def __init__(
        self,
        listener: socket.socket,
        new_connection: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        tls_limit_s: float | None,  # for a handshake, and for the end of a connection
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._new_connection = new_connection
        self._tls = tls
        self._tls_limit_s = tls_limit_s
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Refuse further connections."""
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Wait for the handshakes in progress, which have a time limit."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_PER_TURN):
            try:
                line, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # its client has left
            except OSError as error:
                log.error("connections cannot be accepted: %s; trying again in %g s", error, PAUSE_S)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_S, self._listen)
                return
            line.setblocking(False)
            opening = self._loop.create_task(self._open(line))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, line: socket.socket) -> None:
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                self._new_connection,
                line,
                ssl=self._tls,
                ssl_handshake_timeout=self._tls_limit_s,
                ssl_shutdown_timeout=self._tls_limit_s,
            )
        except OSError as error:  # of the client: it has left, or speaks no TLS
            log.debug("a connection was not opened: %s", error)
            line.close()
