"""The processes that use one file of kept responses."""

import contextlib
import os
import re
import secrets
from pathlib import Path

from quire.ipc.process_lock import ProcessLock, if_free
from quire.server.service.response_tables import MEMORY

_BEFORE = "-process-"  # after the name of the file
_RUNNER = re.compile(r"[0-9a-f]{16}")


class ResponseRunners:
    """Each process holds the lock of a file beside the database, by which others see that it lives. A clock could not
    tell: it can be set, and a process can be slow.

    `own` names this process. A database in memory has no other.
    """

    def __init__(self, path: str) -> None:
        # The same for all processes, whatever links lead to the database.
        self._path = None if path == MEMORY else Path(os.path.realpath(path))
        self.own = secrets.token_hex(8)
        self._lock = None if self._path is None else self._take_lock()

    def _take_lock(self) -> ProcessLock:
        while True:
            lock = self._lock_of(self.own)
            lock.touch(0o600, exist_ok=False)
            with contextlib.suppress(FileNotFoundError):  # removed before it was locked
                return ProcessLock(lock)

    def _lock_of(self, runner: str) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}{_BEFORE}{runner}")

    def has_ended(self, runner: str) -> bool:
        if runner == self.own:
            return False
        if self._path is None:
            return True
        with if_free(self._lock_of(runner)) as is_free:
            return is_free

    def remove_ended(self) -> None:
        """Remove the files of processes that could not do it."""
        if self._path is None:
            return
        before = self._path.name + _BEFORE
        for found in self._path.parent.iterdir():
            if found.name.startswith(before) and _RUNNER.fullmatch(found.name.removeprefix(before)):
                with if_free(found) as is_free:
                    if is_free:
                        found.unlink(missing_ok=True)

    def leave(self) -> None:
        if self._lock is not None:
            self._lock.release()
