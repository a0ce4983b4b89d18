"""A process that the supervisor started."""

import asyncio
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

from quire.ipc.supervisor_link import PARENTS_SIGNALS, ControlMessage, Heartbeat, Refused, SupervisorLink, Up, open_link

Arguments = Callable[[socket.socket], tuple[Any, ...]]  # given the process's end of its link

_spawn = multiprocessing.get_context("spawn")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes started within have SIGINT and SIGTERM blocked, until `bind_to_parent` ignores them.

    Those that come meanwhile reach this process afterwards.
    """
    resource_tracker.ensure_running()  # it is started with the first process otherwise, and unblocks signals then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A process and the supervisor's end of its link. Owned by the supervisor's loop.

    Is started where it is made; `ended` is set when the process is gone, however it went.
    """

    def __init__(
        self, name: str, target: Callable[..., None], args: Callable[[socket.socket], tuple[Any, ...]]
    ) -> None:
        self.name = name
        self.refusal: Refused | None = None
        self.heartbeat: Heartbeat | None = None
        self.heard_s = time.monotonic()
        self.ready_since_s: float | None = None
        self.up = asyncio.Event()
        self.refused = asyncio.Event()
        self.ended = asyncio.Event()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._process: SpawnProcess = _spawn.Process(target=target, args=args(theirs), name=name)
            with _signals_held():
                self._process.start()
        self._line = ours
        self._link: SupervisorLink | None = None
        self.exit_code: int | None = None  # while it runs
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.sentinel, self._note_end)

    @property
    def exit_status(self) -> str:
        """Once it has ended."""
        code = self.exit_code
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    @property
    def ready_s(self) -> float | None:
        """For how long it has been ready; None if it never was."""
        return None if self.ready_since_s is None else time.monotonic() - self.ready_since_s

    async def hold(self) -> "Child":
        self._link = await open_link(self._line, self._take, lambda: None)
        return self

    def tell(self, message: ControlMessage) -> None:
        if self._link is not None and not self.ended.is_set():
            self._link.tell(message)

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()

    def _take(self, message: ControlMessage) -> None:
        self.heard_s = time.monotonic()
        if isinstance(message, Heartbeat):
            self.heartbeat = message
        elif isinstance(message, Refused):
            self.refusal = message
            self.refused.set()
        elif isinstance(message, Up):
            self.ready_since_s = self.heard_s
            self.up.set()

    def _note_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self.exit_code = self._process.exitcode
        self._process.close()  # its files, which would stay open until somebody collects garbage
        # What it said last is read in the next turn.
        self._loop.call_later(0.05, self._close)

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        self.ended.set()
