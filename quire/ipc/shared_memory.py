"""Memory that several processes map."""

import os
import sys
import tempfile


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
