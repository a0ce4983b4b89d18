"""Files that are read: regular ones, and no more of them than a limit.

A path may come from a client, or from a repository that others write. It may lead to a device without an end, or to a
pipe that nothing is written to. Links are followed: the hub's cache and the volumes of Kubernetes consist of them.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

CHUNK_BYTES = 1 << 20
MAX_TEXT_BYTES = 16 << 20  # of what is written by hand: settings, keys, templates, certificates

_KINDS = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | Path, *, follows_links: bool = True) -> BufferedReader:
    """Open a regular file to read it. Never waits, as the opening of a pipe would. Raises OSError, also for a file that
    is not regular."""
    flags = os.O_NONBLOCK | os.O_NOCTTY | (0 if follows_links else os.O_NOFOLLOW)
    file = open(path, "rb", opener=lambda name, given: os.open(name, given | flags))  # noqa: SIM115
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind != stat.S_IFREG:
        file.close()
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something')}, not a regular file", str(path))
    return file


def read_regular(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The contents of a regular file. Raises OSError, also for a file of more than `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        chunks, num_read = [], 0
        while size <= max_bytes and (chunk := file.read(min(CHUNK_BYTES, max_bytes + 1 - num_read))):
            chunks.append(chunk)
            num_read += len(chunk)
            size = max(size, num_read)  # it may grow, and files of the kernel have no size
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {size} bytes; at most {max_bytes} are read", str(path))
    return b"".join(chunks)


def read_regular_text(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file. Raises OSError, or UnicodeDecodeError."""
    return read_regular(path, max_bytes).decode()
