"""The engine's end of the connections to front ends."""

import asyncio
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import msgspec

from quire.errors import InvalidRequest
from quire.ipc.decoding import decode_commands
from quire.ipc.framing import Frames, frame
from quire.ipc.messages import Broken, Command, Described, Event, Hello, PromptBlocks, Ready

log = logging.getLogger(__name__)

MAX_NUMBER = 2**22 - 1  # of a front end, so that request ids fit into 63 bits
MAX_UNSENT_BYTES = 64 * 2**20  # a front end that leaves more than this unread is disconnected
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer, as Linux reports them

Greeting = Described | Ready | Broken


class Port(Protocol):
    """One front end's access to the engine."""

    def send(self, command: Command) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """The process that serves the connections."""

    loop: asyncio.AbstractEventLoop

    @property
    def greetings(self) -> Sequence[Greeting]:
        """Sent to every front end, in this order. Only ever grows."""

    def join(self, connection: "FrontEndConnection") -> None: ...

    def leave(self, connection: "FrontEndConnection") -> None: ...

    def relay(self, message: PromptBlocks, sender: "FrontEndConnection") -> None:
        """Send it to the other front ends."""

    def open_port(self, deliver: Callable[[list[Event]], None], number: int) -> Port:
        """Called once `Ready` is among the greetings."""


class FrontEndConnection(asyncio.Protocol):
    """Receives commands and sends frames of events. Requests are aborted when the connection is lost.

    Owned by the event loop; only `deliver` is called by the engine's thread.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._frames = Frames()
        self._number: int | None = None  # until its Hello
        self._port: Port | None = None
        self._num_greeted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        if not is_of_this_user(transport):
            log.error("a process of another user has connected and is dropped")
            self._transport.abort()
            return
        self._host.join(self)

    def greet(self) -> None:
        """Send the greetings that were not sent yet. Ready, and what follows it, waits for the front end's Hello."""
        news: list[Greeting] = []
        for greeting in self._host.greetings[self._num_greeted :]:
            if isinstance(greeting, Ready):
                if self._number is None:
                    break
                self._port = self._host.open_port(self.deliver, self._number)
            news.append(greeting)
        self._num_greeted += len(news)
        if news:
            self.send(frame(news))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._obey(payload)
        except (
            ValueError,
            msgspec.MsgspecError,
            InvalidRequest,
        ) as error:  # not ours, or of another version
            log.error("a front end has sent an invalid message and is dropped: %s", error)
            self._transport.abort()

    def _obey(self, payload: bytes) -> None:
        for command in decode_commands(payload):
            if isinstance(command, PromptBlocks):
                self._host.relay(command, self)
            elif isinstance(command, Hello):
                if self._number is not None or not 0 < command.number <= MAX_NUMBER:
                    raise ValueError(f"a front end says hello twice, or with the number {command.number}")
                self._number = command.number
                self.greet()
            elif self._port is None:
                raise ValueError("a command came before the engine was ready")
            else:
                self._port.send(command)

    def deliver(self, events: list[Event]) -> None:
        """Send one step's events as one frame. Called on the engine's thread."""
        self._host.loop.call_soon_threadsafe(self.send, frame(events))

    def send(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("a front end has left more than %d bytes unread and is dropped", MAX_UNSENT_BYTES)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._host.leave(self)
        if self._port is not None:
            self._port.close()


def is_of_this_user(transport: asyncio.BaseTransport) -> bool:
    """The peer runs as the same user. A name without a file has no permissions of its own."""
    peer = transport.get_extra_info("socket")
    if sys.platform != "linux" or peer is None:
        return True
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())
