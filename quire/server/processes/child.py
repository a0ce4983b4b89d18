"""A process that the supervisor started."""

import asyncio
import logging
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

from quire.ipc.supervisor_link import (
    PARENTS_SIGNALS,
    ControlMessage,
    Heartbeat,
    StartRefused,
    SupervisorLink,
    Up,
    open_link,
)
from quire.ipc.worker_counts import WorkerCounts

log = logging.getLogger(__name__)

KILLED = "signal 9: killed from outside, or by the system for lack of memory"

_spawn = multiprocessing.get_context("spawn")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Start processes with SIGINT and SIGTERM blocked, until `bind_to_parent` ignores them.

    Signals that come meanwhile reach this process afterwards.
    """
    resource_tracker.ensure_running()  # else the first process starts it, and it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Child:
    """A process and the supervisor's end of its link. Owned by the supervisor's loop.

    The constructor starts it; `ended` is set when the process is gone.
    """

    def __init__(
        self, name: str, target: Callable[..., None], args: Callable[[socket.socket], tuple[Any, ...]]
    ) -> None:
        """`args` makes the arguments of `target`, given the process's end of the link."""
        self.name = name
        self.refusal: StartRefused | None = None
        self.heartbeat: Heartbeat | None = None
        self.heard_s = time.monotonic()
        self.ready_since_s: float | None = None
        self.on_counts: Callable[[WorkerCounts], None] = lambda counts: None
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
        self._was_killed = False  # by this process
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.sentinel, self._note_end)

    @property
    def exit_status(self) -> str:
        code = self.exit_code
        if code == -signal.SIGKILL and not self._was_killed:
            return KILLED
        return f"signal {-code}" if code is not None and code < 0 else f"status {code}"

    @property
    def ready_s(self) -> float | None:
        """Seconds since it was ready; None if it never was."""
        return None if self.ready_since_s is None else time.monotonic() - self.ready_since_s

    async def connected(self) -> "Child":
        self._link = await open_link(self._line, self._on_message, lambda: None)
        return self

    def send(self, message: ControlMessage) -> None:
        if self._link is not None and not self.ended.is_set():
            self._link.send(message)

    def kill(self) -> None:
        if self.exit_code is None:
            self._was_killed = True
            self._process.kill()

    async def end(self, within_s: float) -> None:
        """Wait for a process after Stop; kill it when the time has passed."""
        try:
            await asyncio.wait_for(self.ended.wait(), within_s)
        except TimeoutError:
            log.error("%s did not end within %g s and is killed", self.name, within_s)
            self.kill()
            await self.ended.wait()

    def _on_message(self, message: ControlMessage) -> None:
        self.heard_s = time.monotonic()
        if isinstance(message, Heartbeat):
            self.heartbeat = message
        elif isinstance(message, StartRefused):
            self.refusal = message
            self.refused.set()
        elif isinstance(message, Up):
            self.ready_since_s = self.heard_s
            self.up.set()
        elif isinstance(message, WorkerCounts):
            self.on_counts(message)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self.exit_code = self._process.exitcode
        self._process.close()  # its files, which would stay open until the next garbage collection
        # Its last messages are read in the next turn of the loop.
        self._loop.call_later(0.05, self._close)

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        self.ended.set()
