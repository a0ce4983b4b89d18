"""The link between a process and the supervisor that started it."""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from quire.ipc.framing import Frames, frame
from quire.ipc.unix_transport import open_transport
from quire.ipc.watchdog_timeout import LongestStep
from quire.ipc.worker_counts import WorkerCounts

_SET_DEATH_SIGNAL, _SET_NAME = 1, 15  # of prctl
OOM_SCORE, MAX_OOM_SCORE = 100, 1000  # a tenth of the machine's memory, in what the system compares


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To a process: end."""


class GaveUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To an HTTP worker: an engine will not be started again."""

    reason: str
    engine: int = 0  # its number


class Up(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From a process: ready."""


class StartRefused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From a process: it cannot get ready, with the reason."""

    kind: str
    message: str


class Alive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From an HTTP worker, and from an engine that is being built, every second: its event loop runs."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the engine, several times a second."""

    waited_s: float  # time with work and without a finished step
    longest: LongestStep
    num_tokens: int  # in the step under way; 0 if there is none
    is_compiling: bool  # the step under way waited for a program to compile
    is_searching: bool  # for a request that makes steps fail
    is_checking: bool  # the idle device is being checked; `waited_s` is the time of the check


ALIVE_INTERVAL_S = 1.0

ControlMessage = Stop | GaveUp | Up | StartRefused | Alive | Heartbeat | WorkerCounts

PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # handled by the supervisor only

_decode = msgspec.msgpack.Decoder(list[ControlMessage]).decode


class SupervisorLink(asyncio.Protocol):
    """One end of the socket between a supervisor and one of its processes. Owned by the event loop.

    Calls `on_message` for each message of the other side, and `lost` when the other side is gone.
    """

    def __init__(self, on_message: Callable[[ControlMessage], None], lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._lost = lost
        self._frames = Frames()

    def send(self, message: ControlMessage) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame([message]))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            for message in _decode(payload):
                self._on_message(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


async def open_link(
    line: socket.socket, on_message: Callable[[ControlMessage], None], lost: Callable[[], None]
) -> SupervisorLink:
    """A link over the socket `line`."""
    return await open_transport(lambda: SupervisorLink(on_message, lost), line)


def bind_to_parent(name: str, parent: int) -> None:
    """Called first in a new process: it ends when its parent ends, even if it is stuck, and ignores SIGINT and SIGTERM.

    A terminal and a service manager signal every process of a service; the parent decides which of them ends when.
    """
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)  # processes that this one starts inherit the mask
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_SET_NAME, name.encode()[:15])  # what ps and top show
        prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        _end_before_parent()
        if os.getppid() != parent:  # the parent has already ended
            os._exit(1)


def _end_before_parent() -> None:
    """Let the system end this process before its parent when memory runs out: the parent logs it and starts another."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):  # /proc may be hidden
        score.write_text(str(min(MAX_OOM_SCORE, int(score.read_text()) + OOM_SCORE)))
