"""Memory that several processes map."""

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator

_MAX_TRIES = 1000  # to get a lock that others hold for microseconds


def new_memory(num_bytes: int) -> int:
    """The descriptor of a file of zeros, which has no name, so that nothing is left of it in the end.

    It is on no disk, or has its room there from the beginning: a process that writes to memory for which a full disk
    has no block is ended by SIGBUS.
    """
    if sys.platform == "linux":
        file = os.memfd_create("quire")
        os.truncate(file, num_bytes)
        return file
    with tempfile.TemporaryFile() as new:
        new.write(bytes(num_bytes))
        new.flush()
        return os.dup(new.fileno())


@contextlib.contextmanager
def locked(file: int, offset: int, num_bytes: int) -> Iterator[None]:
    """Holds a lock of the system on a part of the memory. It ends with its process, so none is left behind.

    It is held if it comes free in time: a stopped process must not stop the others, and costs one count.
    """
    for _ in range(_MAX_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, offset)
            break
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, num_bytes, offset)
