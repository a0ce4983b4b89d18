"""An HTTP connection: bounded in what its client may send, and fast in what it is sent."""

import asyncio
from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "quire.chunks"
MAX_HEAD_BYTES = 64 * 2**10  # of a request line and its headers
LAST_LOOK_S = 0.05


class ChunkWriter(Protocol):
    """Writes the body of a response that has begun and has no length. It never waits."""

    def is_behind(self) -> bool:
        """Whether the client reads slower than it is written to: then the way is `send`, which waits."""

    def write_chunk(self, data: bytes) -> None: ...


class Connection(HttpToolsProtocol):
    """An HTTP connection that offers a `ChunkWriter` to the application, beside what ASGI has.

    Between a token and the socket ASGI puts a future, a task's turn and two coroutines, which together cost more than
    writing to the socket does.

    A client that does not come to the end of its headers, or of its body, is let go: neither parser nor server has a
    bound for that.
    """

    max_head_s = 30.0  # for headers to come, and
    max_body_s = 120.0  # for what follows them

    _head_bytes = 0  # of a head that is not complete
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_body()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head(f"the headers have more than {MAX_HEAD_BYTES} bytes")

    def _begin_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            late = f"the headers have not come within {self.max_head_s:g} s"
            self._head_timer = self.loop.call_later(self.max_head_s, self._refuse_head, late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self, why: str) -> None:
        self._end_head()
        if not self.transport.is_closing():
            self.send_400_response(why)

    def on_headers_complete(self) -> None:
        self._end_head()
        self._begin_body()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._end_body()
        super().on_message_complete()

    def _begin_body(self) -> None:
        self._body_timer = self.loop.call_later(self.max_body_s, self._give_up_body)

    def _end_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _give_up_body(self) -> None:
        if self.flow.read_paused:
            self._begin_body()  # it is not the client that is slow
        elif not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"writer": self}}

    def timeout_keep_alive_handler(self) -> None:
        """A request may have come while this process did not get to run, and timers are seen to before sockets are. So
        the sockets are looked at once more first; a request takes the timer back."""
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, super().timeout_keep_alive_handler)

    def is_behind(self) -> bool:
        return self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        transport = self.transport
        if not transport.is_closing():  # else nobody reads it, and whoever watches the connection says so
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """None where another server runs the application."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    writer: ChunkWriter | None = None if extension is None else extension["writer"]
    return writer
