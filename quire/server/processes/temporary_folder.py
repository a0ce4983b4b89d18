"""A folder that goes with its server."""

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.ipc.process_lock import ProcessLock, if_free

log = logging.getLogger(__name__)

PREFIX = "quire-responses-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that only this user can read. Where its process is killed, `remove_abandoned` removes it.

    It is locked itself, and not a file in it: systemd-tmpfiles leaves such folders alone, however old they are.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            lock = ProcessLock(folder)
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        lock.release()


def remove_abandoned() -> None:
    """Remove the folders that servers of this user left when they were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with if_free(folder) as is_free:
                if is_free:
                    shutil.rmtree(folder)
                    log.info("removed %s, in which a server that was killed had kept responses", folder)
        except FileNotFoundError:  # another server that starts was first
            continue
        except OSError as error:
            log.warning("%s, in which a server that was killed had kept responses, is not removed: %s", folder, error)
