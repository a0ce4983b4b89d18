"""The folder for fetched models, compiled programs and the native library."""

import os
import stat
import tempfile
import time
from pathlib import Path

from quire.errors import InvalidSetting

HOME_CACHE = Path("~/.cache/quire")
UNFINISHED_S = 3600.0  # after which no process still writes a file


def cache_folder(chosen: Path | str | None = None, name: str = "cache_dir") -> Path:
    """`chosen`, which is the setting `name`, or ~/.cache/quire, or a temporary folder for a user without a home."""
    try:
        return Path(chosen or HOME_CACHE).expanduser()
    except RuntimeError as error:  # HOME is not set, and no user has this number
        if chosen is not None:
            raise InvalidSetting(f"{name} = {str(chosen)!r}: {error}") from error
    return _temporary_cache()


def hub_folder(cache_dir: Path | str | None, hub_cache: Path | str | None) -> Path | None:
    """The cache of the hub's client: `hub_cache` itself, or a folder in `cache_dir`. None: the client's own."""
    if hub_cache is not None:
        return cache_folder(hub_cache, "hub_cache")
    return None if cache_dir is None else cache_folder(cache_dir) / "hub"


def is_left_unfinished(path: Path) -> bool:
    """True for an unfinished file that no process still writes: it is old, or a clock was wrong when it was written."""
    return abs(time.time() - path.stat().st_mtime) > UNFINISHED_S


def last_use_s(path: Path) -> float:
    """The time at which it was used last. A time in the future comes from a clock that was wrong: it was long ago. The
    clocks of machines that share a folder may differ a little."""
    used_s = path.stat().st_mtime
    return used_s if used_s <= time.time() + UNFINISHED_S else 0.0


def _temporary_cache() -> Path:
    """Files in it are loaded as code, so only this user may own it: any user can create folders next to it."""
    folder = Path(tempfile.gettempdir()) / f"quire-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InvalidSetting(
            f"there is no home folder, and {folder} cannot be made ({error}): set --cache-dir"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InvalidSetting(f"there is no home folder, and {folder} is open to other users: set --cache-dir")
    return folder
