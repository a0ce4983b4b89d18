"""Addresses of local sockets."""

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_address() -> Iterator[str]:
    """A unique address for a local socket.

    On Linux it is a name without a file, which ends with its process in any case. Elsewhere it is a file in a folder
    that only this user can read.
    """
    if sys.platform == "linux":
        yield f"\0quire-{os.getpid()}-{secrets.token_hex(8)}"
        return
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        yield str(Path(folder) / "engine.sock")
