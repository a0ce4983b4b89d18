"""Where front ends find the engine process."""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # process, user and group, as Linux tells them


@contextlib.contextmanager
def new_address() -> Iterator[str]:
    """A local socket's address that nobody else has.

    On Linux it is a name without a file, which goes when its process goes, however that ends. Elsewhere it is a file
    in a folder of this user alone.
    """
    if sys.platform == "linux":
        yield f"\0quire-{os.getpid()}-{secrets.token_hex(8)}"
        return
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        yield str(Path(folder) / "engine.sock")


def is_of_this_user(transport: asyncio.BaseTransport) -> bool:
    """Whether who has connected runs as the same user: a name without a file has no permissions of its own."""
    peer = transport.get_extra_info("socket")
    if sys.platform != "linux" or peer is None:
        return True
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())
