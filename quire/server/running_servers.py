"""The addresses of this user's servers on this machine, in files that `quire health` reads."""

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.ipc.process_lock import ProcessLock

log = logging.getLogger(__name__)


@contextlib.contextmanager
def announced(address: str) -> Iterator[None]:
    """A file with the address of this server, for as long as it runs. A lock ends with its process in any case."""
    with contextlib.ExitStack() as stack:
        try:
            folder = _folder()
            folder.mkdir(mode=0o700, exist_ok=True)
            if not _is_own(folder):  # links in it would lead writers to other files of this user
                raise OSError(f"{folder} is not a folder of this user")
            _remove_old_ones(folder)
            stack.callback(_written(folder / f"{os.getpid()}.address", address).release)
        except OSError as error:
            log.warning("`quire health` finds this server by its address only: %s", error)
        yield


def _written(file: Path, address: str) -> ProcessLock:
    while True:
        file.write_text(address, encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):  # another server that starts removed it before it was locked
            return ProcessLock(file)


def running_servers() -> list[str]:
    """The addresses of the servers that run."""
    found = []
    for file in _files(_folder()):
        with contextlib.suppress(OSError), file.open(encoding="utf-8") as opened:
            if _is_locked(opened.fileno()):
                found.append(opened.read())
    return [address for address in found if address]


def _remove_old_ones(folder: Path) -> None:
    """Remove the files of servers that were killed."""
    for file in _files(folder):
        with contextlib.suppress(OSError), file.open(encoding="utf-8") as opened:
            if not _is_locked(opened.fileno()):
                file.unlink(missing_ok=True)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"quire-servers-{os.getuid()}"


def _files(folder: Path) -> list[Path]:
    """None of a folder that another user has made."""
    try:
        return sorted(folder.glob("*.address")) if _is_own(folder) else []
    except OSError:
        return []


def _is_own(folder: Path) -> bool:
    """It is a folder of this user, not a link to one, and no other user can make files in it."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
