"""Built libraries on disk, checked before they are loaded."""

import ctypes
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.files.cache_folder import is_left_unfinished
from quire.files.regular_file import open_regular

log = logging.getLogger(__name__)

KEY_LENGTH, DIGEST_LENGTH = 24, 32
TRIAL_TIMEOUT_S = 60
SCRATCH = ".build-"  # begins the names of folders to build in
# Loads a library and runs a vectorised function of it, in a process that may end by a signal.
TRIAL = """
import ctypes, sys
path, pack, *symbols = sys.argv[1:]
built = ctypes.CDLL(path)
for symbol in symbols:
    getattr(built, symbol)
if pack:
    weights, tiles = (ctypes.c_float * 256)(*range(256)), (ctypes.c_byte * 288)()
    getattr(built, pack)(weights, *map(ctypes.c_int64, (8, 1, 32)), tiles)
"""


class LibraryFailed(Exception):
    """A library was built, and cannot be used."""


class LibraryStore:
    """A folder of libraries.

    A file is named by a digest of all that decides its code, and by a digest of its content: loading a damaged file
    would end the process by a signal. Files appear whole and are never changed, so that several processes may build
    at the same time. The folder is as trusted as this code is.
    """

    def __init__(self, folder: Path, identity: Sequence[str]) -> None:
        """`identity` says all that the code depends on: sources, flags, compiler, processor."""
        self._folder = folder
        self._key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:KEY_LENGTH]

    def find(self) -> Path | None:
        """The library, where there is one that is whole."""
        try:
            kept = sorted(self._folder.glob(f"{self._key}-*.so"))
        except OSError:  # of a folder that may not be looked into
            return None
        damaged = []
        for path in kept:
            try:
                if path.stem == self._stem(path):
                    return path
                damaged.append(f"{path} is damaged")
            except OSError as error:
                damaged.append(f"{path} cannot be read ({error})")
        for message in damaged:
            log.warning("%s; the native library is built again", message)
        return None

    def open(self, build: Callable[[Path, Path], None], symbols: Sequence[str] = (), pack: str = "") -> ctypes.CDLL:
        """The library, built first where none is kept: `build` is given a folder to work in and the file to make.

        A new library must pass a trial, in which its `symbols` are looked up and the function `pack` is run. Raises
        what `build` raises, LibraryFailed or OSError.
        """
        path = self.find()
        if path is not None:
            return _load(path)
        with self._scratch() as scratch:
            built = Path(scratch) / "library.so"
            build(Path(scratch), built)
            _try(built, symbols, pack)
            return _load(self._keep(built))

    def _scratch(self) -> "tempfile.TemporaryDirectory[str]":
        """A folder to build in, on the store's file system where that can be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._delete_unfinished()
            return tempfile.TemporaryDirectory(dir=self._folder, prefix=SCRATCH)
        except OSError as error:
            log.warning("the native library cannot be kept for the next start in %s: %s", self._folder, error)
            return tempfile.TemporaryDirectory(prefix="quire-native-")

    def _delete_unfinished(self) -> None:
        """Delete what processes left that ended while they built."""
        for path in self._folder.glob(f"{SCRATCH}*"):
            with suppress(FileNotFoundError):
                if is_left_unfinished(path):
                    shutil.rmtree(path, ignore_errors=True)

    def _keep(self, built: Path) -> Path:
        """Its place in the store; the file itself, which can be deleted once it is loaded, where it has none."""
        kept = self._folder / f"{self._stem(built)}.so"
        if built.parent.parent != self._folder:
            return built
        try:
            return built.replace(kept)
        except OSError as error:
            log.warning("%s cannot be kept for the next start: %s", kept, error)
            return built

    def _stem(self, path: Path) -> str:
        with open_regular(path) as file:
            return f"{self._key}-{hashlib.file_digest(file, 'sha256').hexdigest()[:DIGEST_LENGTH]}"


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # the loader's message does not always name the file
        raise LibraryFailed(f"{path} cannot be loaded: {error}") from error


def _try(path: Path, symbols: Sequence[str], pack: str) -> None:
    """Run it in a process of its own: a compiler can take a processor for one with more instructions than it has."""
    trial = [sys.executable, "-I", "-S", "-c", TRIAL, str(path), pack, *symbols]
    try:
        ended = subprocess.run(trial, check=False, capture_output=True, timeout=TRIAL_TIMEOUT_S)
    except OSError as error:  # where Python is part of another program there is no interpreter to run
        log.info("the native library is used without a trial: %s", error)
        return
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"status {ended.returncode}"
        raise LibraryFailed(f"the new library failed its trial, which ended with {how} {' '.join(said)[:500]}".strip())
