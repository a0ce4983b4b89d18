"""Locks that end with their process, however it ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW


class ProcessLock:
    """The lock of a file or of a folder. The system releases it when the process ends, killed or not.

    `release` removes a file. One that its process could not remove is not locked any more.
    """

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError where the path was removed meanwhile, as one that no process holds."""
        self.path = path
        self._descriptor = os.open(path, _FLAGS)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # waits for one that looks whether it is held
            if not os.path.samestat(os.fstat(self._descriptor), os.lstat(path)):
                raise FileNotFoundError(f"{path} was replaced")
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        if self.path.is_file():
            self.path.unlink()
        os.close(self._descriptor)


@contextlib.contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """True where no process holds the path, and none can take it within the block."""
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)
