"""The engine's end of one connection."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING, cast

import msgspec

from quire.engine.address import is_of_this_user
from quire.engine.messages import Abort, Event, Failed, Progress, Submit
from quire.engine.port import Port
from quire.engine.wire import Broken, Counts, Described, Frames, Hello, Ready, Started, decode_commands, frame
from quire.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.engine.process import EngineProcess

log = logging.getLogger(__name__)

MAX_NUMBER = 2**22 - 1  # of a front end, so that request ids fit into 63 bits
MAX_UNSENT_BYTES = 64 * 2**20  # a front end that leaves so much unread is given up


class FrontEnd(asyncio.Protocol):
    """Commands in, frames of events out. What it asked for is aborted when its connection is lost.

    Owned by the event loop; `deliver` alone is called by the engine's thread.
    """

    def __init__(self, process: "EngineProcess") -> None:
        self._process = process
        self._frames = Frames()
        self._number: int | None = None  # until it has said hello
        self._port: Port | None = None
        self._was_described = False
        self._was_told_why = False
        self.counts: Counts | None = None  # what it last told
        self._submitted_s: dict[int, float] = {}  # of requests that have no token yet; both threads pop from it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        if not is_of_this_user(transport):
            log.error("a process of another user has connected and is dropped")
            self._transport.abort()
            return
        self._process.join(self)

    def greet(self) -> None:
        """Say what can be said by now and was not yet."""
        process = self._process
        news: list[Described | Ready | Broken] = []
        if process.described is not None and not self._was_described:
            self._was_described = True
            news.append(process.described)
        if process.broken is not None and not self._was_told_why:
            self._was_told_why = True
            news.append(process.broken)
        if process.driver is not None and process.metered is not None and self._port is None and self._number:
            self._port = process.driver.open(self.deliver, self._number)
            limit = process.metered.engine.scheduler.limits.max_sequence_tokens
            news.append(Ready(limit, process.metered.platform))
        if news:
            self.send(frame(news))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._obey(payload)
        except (ValueError, msgspec.MsgspecError, InvalidRequest) as error:  # no front end of ours, or of this version
            log.error("a front end sends what is no command and is dropped: %s", error)
            self._transport.abort()

    def _obey(self, payload: bytes) -> None:
        now = time.monotonic()
        for command in decode_commands(payload):
            if isinstance(command, Counts):
                self.counts = command
                continue
            if isinstance(command, Hello):
                if self._number is not None or not 0 < command.number <= MAX_NUMBER:
                    raise ValueError(f"a front end says hello twice, or with the number {command.number}")
                self._number = command.number
                self.greet()
                continue
            if self._port is None:
                raise ValueError("a command came before the engine was ready")
            if isinstance(command, Submit):
                self._submitted_s[command.request.request_id] = now
            elif isinstance(command, Abort):
                self._submitted_s.pop(command.request_id, None)
            self._port.send(command)

    def deliver(self, events: list[Event]) -> None:
        """On the engine's thread: one step's events become one frame."""
        submitted = self._submitted_s
        messages: list[Event | Started] = []
        if submitted:
            for event in events:
                if isinstance(event, Progress):
                    messages += [
                        self._started(update.request_id) for update in event.updates if update.request_id in submitted
                    ]
                elif isinstance(event, Failed):
                    submitted.pop(event.request_id, None)
        data = frame([*messages, *events])
        self._process.loop.call_soon_threadsafe(self.send, data)

    def _started(self, request_id: int) -> Started:
        now = time.monotonic()
        submitted_s = self._submitted_s.pop(request_id, now)
        metered = self._process.metered
        start_s = metered.meter.pop_start_s(request_id) if metered is not None else None
        return Started(request_id, max(0.0, (now if start_s is None else start_s) - submitted_s))

    def send(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("a front end has left more than %d bytes unread and is dropped", MAX_UNSENT_BYTES)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._process.leave(self)
        if self._port is not None:
            self._port.close()
