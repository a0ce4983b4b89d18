"""Server-sent events."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import QuireError
from quire.server.http.connection import COMMENT, MAX_SILENCE_S, ChunkWriter, event_writer, max_silence_s
from quire.server.offload import LARGE_BYTES
from quire.server.service.answers import ClientGone, closing_when_gone, watching
from quire.server.service.open_prompt import TokenDelta
from quire.server.service.stream import Sink, Stream

HEADERS_AFTER_S = 10.0  # where no engine accepts or refuses a request, as while it starts again
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
to_json = msgspec.json.Encoder().encode


def token_template(before_index: bytes, before_text: bytes, after: bytes) -> bytes:
    """An event for `%`, in which only the choice's index and the text change."""
    return (
        b"%d".join(part.replace(b"%", b"%%") for part in (before_index, before_text))
        + b"%b"
        + after.replace(b"%", b"%%")
    )


class EventEncoder(Protocol):
    """The events of one response, as bytes."""

    @property
    def largest_event(self) -> int:
        """Estimated bytes of an event beyond a few tokens; 0 for most. Large events are encoded in threads."""

    def encode(self, deltas: list[TokenDelta]) -> bytes:
        """The events of one step's deltas."""

    def finish(self) -> bytes:
        """The end of a stream that is complete."""

    def fail(self, error: QuireError) -> bytes:
        """The end of a stream that fails."""


class EventStream(Response):
    """A stream as events: one write for each step with deltas.

    While the client keeps up, the service writes a step's events at once; this coroutine handles the beginning, the
    end, a client that is behind, and comments while nothing is written: proxies cut connections that are silent for
    long. `first` has the deltas that were read before the response began; None where there were none yet. `keep` is
    awaited before the end is written.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: Stream,
        encoder: EventEncoder,
        first: list[TokenDelta] | None,
        headers: dict[str, str],
        keep: Callable[[Stream], Awaitable[bool]] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(EVENT_HEADERS | headers)
        self._stream = stream
        stream.has_status = True
        self._encoder = encoder
        self._first = first
        self._keep = keep
        self._now = asyncio.get_running_loop().time
        self._written_s = self._now()
        self._max_silence_s = MAX_SILENCE_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._stream
        is_large = self._encoder.largest_event >= LARGE_BYTES
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        async with closing_when_gone(stream, receive):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            writer = event_writer(scope)
            self._max_silence_s = max_silence_s(scope)
            sink = None if is_large else self._sink(writer)
            try:
                deltas = self._first or await self._read(sink, writer, send)
                while deltas:
                    data = await self._encode(deltas)
                    if data:
                        await self._write(data, send)
                    deltas = await self._read(sink, writer, send)
                if not stream.is_over:
                    return  # the client is gone
                if self._keep is not None:
                    await self._keep(stream)
                last = self._encoder.finish()
            except QuireError as error:
                last = self._encoder.fail(error)
            except Exception as defect:  # of an encoder, or of what keeps the answer
                last = self._encoder.fail(stream.broken_off(defect))
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _read(self, sink: Sink | None, writer: ChunkWriter | None, send: Send) -> list[TokenDelta]:
        """The next deltas that the sink does not take. Comments are written while nothing else is."""
        while True:
            try:
                async with asyncio.timeout_at(self._written_s + self._max_silence_s):
                    return await self._stream.read(sink)
            except TimeoutError:
                now = self._now()
                if now - self._written_s < self._max_silence_s:
                    continue  # the sink has written since
                if writer is not None and writer.is_behind():
                    self._written_s = now  # there is something to read
                else:
                    await self._write(COMMENT, send)

    async def _write(self, data: bytes, send: Send) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._written_s = self._now()

    async def _encode(self, deltas: list[TokenDelta]) -> bytes:
        return await self._stream.service.offload.run(self._encoder.largest_event, lambda: self._encoder.encode(deltas))

    def _sink(self, writer: ChunkWriter | None) -> Sink | None:
        if writer is None:
            return None
        is_behind, write, encode, now = writer.is_behind, writer.write_chunk, self._encoder.encode, self._now

        def write_all(deltas: list[TokenDelta]) -> bool:
            if is_behind():
                return False
            data = encode(deltas)
            if data:
                write(data)
                self._written_s = now()
            return True

        return write_all


async def first_deltas(stream: Stream, receive: Receive) -> list[TokenDelta] | None:
    """The first deltas; None where the engine has accepted the request and there are none yet. Raises the error that
    refuses the request, or ClientGone."""
    try:
        async with watching(stream, receive):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEADERS_AFTER_S):
                    await stream.admission()
        if stream.is_waiting:
            return None
        deltas = await stream.read()
        if not deltas and not stream.is_over:
            raise ClientGone
    except BaseException:
        stream.close()
        raise
    return deltas
