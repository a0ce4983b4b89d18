"""What ties a process to the supervisor that started it."""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from quire.ipc.framing import Frames, frame
from quire.ipc.longest_step import LongestStep

_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # of prctl


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To a process: come to an end."""


class GaveUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To an HTTP worker: there will be no engine any more."""

    reason: str


class Up(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From a process: it is ready."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From a process: why it will not get ready."""

    kind: str
    message: str


class Alive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From an HTTP worker, and from an engine that is being made, every second: its loop turns."""


class Pulse(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the engine, several times a second."""

    waited_s: float  # there has been work for so long, and no step has ended
    longest: LongestStep
    num_tokens: int  # of the step under way; 0 where none is
    is_compiling: bool  # the step under way had to wait for a program
    is_searching: bool  # for a request that makes steps fail
    is_checking: bool  # the device, while nothing runs: that is what has been waited for


ALIVE_INTERVAL_S = 1.0

Word = Stop | GaveUp | Up | Refused | Alive | Pulse

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # which a supervisor alone obeys

_decode = msgspec.msgpack.Decoder(list[Word]).decode


class Leash(asyncio.Protocol):
    """One end of the line between a supervisor and a process of its. Owned by the event loop.

    `take` gets each word of the other side, `lost` is told when that is gone.
    """

    def __init__(self, take: Callable[[Word], None], lost: Callable[[], None]) -> None:
        self._take = take
        self._lost = lost
        self._frames = Frames()

    def tell(self, word: Word) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame([word]))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            for word in _decode(payload):
                self._take(word)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


async def hold(line: socket.socket, take: Callable[[Word], None], lost: Callable[[], None]) -> Leash:
    """The leash whose one end is `line`."""
    loop = asyncio.get_running_loop()
    _, leash = await loop.create_unix_connection(lambda: Leash(take, lost), sock=line)
    return leash


def bind_to_parent(name: str, parent: int) -> None:
    """Called first in a new process: it ends when its parent ends, even one that is stuck, and listens to it alone.

    A terminal and a service manager send their signals to every process of a service; which of them ends when is the
    parent's to say.
    """
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)  # processes that this one starts inherit the mask
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_SET_NAME, name.encode()[:15])  # what ps and top show
        prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be bound to
            os._exit(1)
