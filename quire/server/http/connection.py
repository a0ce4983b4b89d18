"""An HTTP connection with bounds on its input and a fast path for its output."""

import asyncio
import select
from typing import Protocol

from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.server.caller import REQUEST_ID, request_id_from
from quire.server.http.parser import Parser, head_without_offer
from quire.server.http.unchunked import Unchunked

EXTENSION = "quire.chunks"
MAX_HEAD_BYTES = 64 * 2**10  # of the request line and headers; and of other data between two parts of a body
LAST_LOOK_S = 0.05
LINGER_S = 2.0
GONE_INTERVAL_S = 0.1  # between checks that a client that sends no more is still there
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\n"
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
COMMENT = b":\n\n"  # of server-sent events; clients skip it
MAX_SILENCE_S = 15.0


class ChunkWriter(Protocol):
    """Writes the body of a chunked response that has begun. It never waits."""

    def is_behind(self) -> bool:
        """The client reads too slowly; use `send`, which waits."""

    def write_chunk(self, data: bytes) -> None: ...


class Connection(HttpToolsProtocol):
    """An HTTP connection that offers the application a `ChunkWriter` in addition to ASGI.

    ASGI puts a future, a turn of a task and two coroutines between a token and the socket, which cost more than writing
    to the socket.

    A client that does not finish its headers or its body in time is disconnected. So is one that does not read, and one
    that sends much data outside its body, as trailers or chunk extensions, which neither parser nor uvicorn limits.
    Trailers are dropped.

    A client that half-closes the connection after its request gets its answer. A client that is gone looks the same
    until something is sent to it, so an interim response is sent, or a comment among events: its system refuses that,
    and the request is aborted.

    Offers to upgrade the connection are ignored.
    """

    parser: Parser
    max_head_s = 30.0
    max_body_s = 120.0
    max_unread_s = 300.0  # that the client takes nothing of what is written
    max_silence_s = MAX_SILENCE_S  # of a stream of events; then a comment shows proxies that it goes on

    _head_bytes = 0  # received of an incomplete head
    _parsed_bytes = 0  # of the same, handed on by the parser
    _bytes_beside = 0  # received since the last part of a body
    _is_refused = False  # further data is ignored
    _closes_after_body = False
    _answering: RequestResponseCycle | None = None  # `cycle` is the latest, which may wait for this one
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = Parser(self)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_body()
        self._end_unread()
        super().connection_lost(exc)
        answering = self._answering
        for cycle in (self.cycle, answering):
            if cycle is not None:
                cycle.transport = self.transport  # the other has a reference to this
        if answering is not None and not answering.response_complete:  # uvicorn notifies the latest only
            answering.disconnected = True
            answering.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._head_timer is not None:
            self._head_bytes += len(data)
        self._bytes_beside += len(data)
        super().data_received(data)
        cycle = self.cycle
        if self._body_timer is not None and cycle is not None and cycle.transport is self.transport:
            cycle.transport = ClosedAfterBody(self)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_large_head()
        if self._body_timer is not None and self._bytes_beside > MAX_HEAD_BYTES:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True keeps the connection open for the answer in progress."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.transport.is_closing():
            return False
        if not self.transport.can_write_eof():
            return False  # TLS closes both sides
        cycle.keep_alive = False
        if not cycle.response_started and not self.pipeline and cycle.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)
        elif cycle.response_started and cycle.scope["extensions"][EXTENSION]["writes_events"]:
            self.write_chunk(COMMENT)
        self._look_whether_gone()
        return True

    def _look_whether_gone(self) -> None:
        """Check whether the client is gone: the transport no longer reads, so nothing else would notice."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if _is_reset(self.transport.get_extra_info("socket").fileno()):
            self.transport.abort()
        else:
            self.loop.call_later(GONE_INTERVAL_S, self._look_whether_gone)

    def on_url(self, url: bytes) -> None:
        self._parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is None:
            return  # a trailer
        self._parsed_bytes += len(name) + len(value) + 4  # a colon, a space and the end of the line
        super().on_header(name, value)

    def _begin_head(self) -> None:
        self._parsed_bytes = 0
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(self.max_head_s, self._refuse_late_head)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._end_head()
        if self.flow.read_paused:
            self._begin_head()  # the client is not to blame
        else:
            self.send_400_response(f"the headers have not come within {self.max_head_s:g} s")

    def _refuse_large_head(self) -> None:
        """The rest is read for a moment: closing a connection that still receives data resets it, and the client would
        never see the answer."""
        self._end_head()
        if self._is_refusable():
            self._is_refused = True
            message = b"the request line and headers have more than %d bytes" % MAX_HEAD_BYTES
            self._write_refusal(_TOO_LARGE, message)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        self._end_head()
        if self._is_refusable():
            self._write_refusal(_BAD_REQUEST, msg.encode())
            self.transport.close()

    def _is_refusable(self) -> bool:
        """False where a request before it has no answer yet: a refusal would stand in the middle of that. What came is
        dropped then, and the connection ends after the answer."""
        if self._closes_after_body:
            self.transport.close()
        if self._is_refused or self.transport.is_closing():
            return False
        if self.pipeline and self.cycle.more_body:  # its body cannot be read, and nothing of it has been
            self.pipeline.popleft()
            assert self._answering is not None, "others wait for it"
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answering
        cycle = self.cycle
        if cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started):
            return True
        self._is_refused = True
        cycle.keep_alive = False
        return False

    def _write_refusal(self, status_line: bytes, message: bytes) -> None:
        """An answer without a request: what came could not be read."""
        about = f"content-type: text/plain; charset=utf-8\r\n{REQUEST_ID}: {request_id_from(None)}\r\n"
        end = f"content-length: {len(message)}\r\nconnection: close\r\n\r\n"
        self.transport.write(status_line + (about + end).encode() + message)

    def on_headers_complete(self) -> None:
        if self._parsed_bytes > MAX_HEAD_BYTES:
            self._refuse_large_head()
            raise ValueError("the parser goes no further")
        parser = self.parser
        if parser.should_upgrade() and (method := parser.get_method()) != b"CONNECT":
            parser.head_without_offer = head_without_offer(method, self.url, parser.get_http_version(), self.headers)
            return  # the head comes again
        self._end_head()
        self._begin_body()
        if parser.get_http_version() == "1.1":
            super().on_headers_complete()
            return
        app = self.app
        self.app = unchunked = Unchunked(app)
        super().on_headers_complete()
        self.app = app
        unchunked.cycle = self.cycle  # which begins in the loop's next turn

    def on_body(self, body: bytes) -> None:
        self._bytes_beside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.head_without_offer is not None:
            return  # its body is still to come
        self._end_body()
        if self._closes_after_body:
            self.transport.close()
        super().on_message_complete()

    def close_after_body(self) -> None:
        """Close when the body has come, or its time is over: closing a connection that still receives data resets it,
        and a client that first sends its whole body would never see the answer."""
        if self._body_timer is None:
            self.transport.close()
        elif not self._closes_after_body and not self.transport.is_closing():
            self._closes_after_body = True
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def _begin_body(self) -> None:
        self._bytes_beside = 0
        self._body_timer = self.loop.call_later(self.max_body_s, self._give_up_body)

    def _end_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _give_up_body(self) -> None:
        if self.flow.read_paused:
            self._begin_body()  # the client is not to blame
        elif not self.transport.is_closing():
            self.transport.close()

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"writer": self, "writes_events": False}}

    def shutdown(self) -> None:
        """Refuse a request that lacks a part of its body: it would be refused with it, and would hold up the end."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline:
            self._write_refusal(_UNAVAILABLE, b"the server is shutting down")
            self.transport.close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """A request may have come while this process did not run, and timers fire before sockets are read. So the
        sockets are read once more first; a request cancels the timer."""
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, super().timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._end_unread()
        super().resume_writing()

    def _await_reading(self) -> None:
        num_left = self.transport.get_write_buffer_size()  # nothing is added until writing resumes
        self._unread_timer = self.loop.call_later(self.max_unread_s, self._give_up_reader, num_left)

    def _give_up_reader(self, num_left: int) -> None:
        if self.transport.get_write_buffer_size() < num_left:
            self._await_reading()  # it is slow
        else:
            self.transport.abort()

    def _end_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def is_behind(self) -> bool:
        return self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        transport = self.transport
        if not transport.is_closing():  # else the client is gone, and the stream's watcher ends it
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class ClosedAfterBody(asyncio.Transport):
    """The transport of an answer that may be complete before the body of its request is."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.transport.write(data)

    def close(self) -> None:
        self._connection.close_after_body()


def _is_reset(descriptor: int) -> bool:
    """The other end has refused data that was sent to it."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are always reported
    return bool(poll.poll(0))


def event_writer(scope: Scope) -> ChunkWriter | None:
    """The writer of a stream of events, each written as one chunk. None under another server than `HttpServer`,
    and where answers are not chunked."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    if extension is None or scope["http_version"] != "1.1":
        return None
    extension["writes_events"] = True
    writer: ChunkWriter = extension["writer"]
    return writer


def max_silence_s(scope: Scope) -> float:
    """Seconds after which a stream of events that writes nothing writes a comment."""
    extension = scope.get("extensions", {}).get(EXTENSION)
    return MAX_SILENCE_S if extension is None else float(extension["writer"].max_silence_s)
