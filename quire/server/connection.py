"""A way for a streamed response to write without a turn of the event loop for every token."""

from typing import Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "quire.chunks"


class ChunkWriter(Protocol):
    """Writes the body of a response that has begun and has no length. It never waits."""

    def is_behind(self) -> bool:
        """Whether the client reads slower than it is written to: then the way is `send`, which waits."""

    def write_chunk(self, data: bytes) -> None: ...


class Connection(HttpToolsProtocol):
    """An HTTP connection that offers a `ChunkWriter` to the application, beside what ASGI has.

    Between a token and the socket ASGI puts a future, a task's turn and two coroutines, which together cost more than
    writing to the socket does.
    """

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"writer": self}}

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
