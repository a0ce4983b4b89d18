"""Compiled programs on disk, so that a second start neither traces nor compiles."""

import contextlib
import fcntl
import hashlib
import logging
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import quire
from quire.files.cache_folder import is_left_unfinished, last_use_s
from quire.files.regular_file import read_regular
from quire.ops.gpu.hopper import mosaic
from quire.ops.native.library import has_failed_parts, need_operation
from quire.ops.native.processor import instruction_set

log = logging.getLogger(__name__)

# The code that compiled programs follow from; limits of requests are sizes of arrays.
SOURCES = ("executor", "models", "ops", "reach.py", "request.py")
NAME_LENGTH = 32
NAME = re.compile(rf"[0-9a-f]{{{NAME_LENGTH}}}")  # marks the folders of this store among others
KEPT_FOLDERS = 64  # those that were used last
MAX_CLAIM_S = 120.0  # that one process waits for another to compile a program; one that stands still has no end
CLAIM_POLL_S = 0.05
MAX_PROGRAM_BYTES = 2 << 30
DIGEST_BYTES = 32  # of SHA-256, before a program


class ProgramStore:
    """A folder of programs by name, for one model at one set of sizes.

    A program is found again only where everything it depends on is the same: this code, JAX, the machine, the model's
    config and the sizes. The folder is as trusted as this code is: its files are loaded as code.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        """`identity` says all about the model and the sizes that the programs depend on."""
        parts = (identity, sources_digest(), machine(), jax.__version__, jaxlib.version.__version__)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:NAME_LENGTH]
        self.place = folder, identity
        self._folder = folder / digest
        self._waits = True  # for programs that other processes make
        self._has_failed = False  # to keep one, which is said once

    @property
    def digest(self) -> str:
        """Of everything that its programs depend on."""
        return self._folder.name

    @property
    def is_empty(self) -> bool:
        try:
            return not any(self._folder.glob("*.program"))
        except OSError:  # of a folder that may not be looked into
            return True

    def shared_timings(self) -> Path | None:
        """A folder beside the programs for what XLA timed; None where nothing can be kept."""
        folder = self._folder / "timings"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return folder if self._keeps and os.access(folder, os.W_OK) else None

    def has(self, name: str) -> bool:
        """True when the program of this name is kept."""
        try:
            return self._path(name).is_file()
        except OSError:  # likewise
            return False

    def load(self, name: str) -> Any | None:
        """The program of this name, or None when it has to be compiled."""
        path = self._path(name)
        try:
            stored = read_regular(path, MAX_PROGRAM_BYTES)
        except OSError as error:  # there is none, or it is another user's; a failure to keep the next one is told
            log.debug("%s cannot be read: %s", path, error)
            return None
        digest, program = stored[:DIGEST_BYTES], memoryview(stored)[DIGEST_BYTES:]
        if hashlib.sha256(program).digest() != digest:  # one that is damaged could end the process, or compute nonsense
            log.warning("%s is damaged and is made again", path)
            return None
        if mosaic.IN_PROGRAMS in stored:
            mosaic.load_library()
        try:
            try:
                return deserialize_and_load(*pickle.loads(program))
            except jax.errors.JaxRuntimeError as error:
                if not need_operation(str(error)) and not (jax.default_backend() == "gpu" and mosaic.load_library()):
                    raise
                return deserialize_and_load(*pickle.loads(program))
        except Exception as error:  # of a program that another machine made, or another compiler
            log.warning("%s cannot be loaded and is made again: %r", path, error)
            return None

    @property
    def _keeps(self) -> bool:
        if jax.config.jax_compilation_cache_dir and jax.default_backend() == "cpu":  # type: ignore[attr-defined]
            return False  # JAX keeps programs, and may have read them: XLA does not write such a program whole
        # The next start may have a compiler that works, and programs that are faster.
        return not has_failed_parts()

    def save(self, name: str, program: Any) -> None:
        if not self._keeps:
            return
        path = self._path(name)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = pickle.dumps(serialize(program))
            unfinished.write_bytes(hashlib.sha256(data).digest() + data)
            unfinished.replace(path)  # atomic, so that no process reads an incomplete file
        except OSError as error:
            if not self._has_failed:
                log.warning("%s cannot be kept for the next start, nor may others: %s", path, error)
            self._has_failed, self._waits = True, False
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)  # on a full disk it would take what is left

    def make(self, name: str, compile: Callable[[], Any]) -> tuple[Any, bool]:
        """The program of this name, compiled and kept if it is not, and whether it was. Of several engines that want it
        at the same time one compiles it and the others load it."""
        was_there = self.has(name)
        program = self.load(name)
        if program is not None:
            return program, True
        # A program that is not kept is not claimed: others would wait for a file that is never written.
        claim = self._claimed(name) if self._waits and self._keeps else contextlib.nullcontext(False)
        with claim as has_waited:
            if has_waited or not was_there:  # another may have made it meanwhile
                program = self.load(name)
            if program is not None:
                return program, True
            program = compile()
            self.save(name, program)
            return program, False

    @contextlib.contextmanager
    def _claimed(self, name: str) -> Iterator[bool]:
        """The right to make a program, which one process has at a time. True if it was waited for. A process goes on
        without the right where files cannot be locked, and after MAX_CLAIM_S; then it waits for no other program."""
        path = self._path(name).with_suffix(".claim")
        until_s, has_right, has_waited = time.monotonic() + MAX_CLAIM_S, False, False
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("w"))
                while not (has_right := _lock(file.fileno())):
                    if time.monotonic() >= until_s:
                        self._waits = False
                        break
                    has_waited = True
                    time.sleep(CLAIM_POLL_S)
            except OSError as error:
                log.debug("%s cannot be locked: %s", path, error)
            try:
                yield has_waited
            finally:
                with contextlib.suppress(OSError):
                    if has_right:  # else it is that of another process
                        path.unlink(missing_ok=True)

    def forget_unused(self) -> None:
        """This folder is used now; those that many others were used after are deleted.

        Every version of the code and every setting has its own, so they would pile up.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.utime(self._folder)
            self._delete_unfinished()
            ours = [path for path in self._folder.parent.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
            last_first = sorted(ours, key=lambda folder: (folder == self._folder, last_use_s(folder)), reverse=True)
        except OSError as error:
            log.warning("%s cannot be tidied up: %s", self._folder.parent, error)
            return
        for folder in last_first[KEPT_FOLDERS:]:
            log.info("programs that %d others were used after are deleted: %s", KEPT_FOLDERS, folder)
            shutil.rmtree(folder, ignore_errors=True)

    def _delete_unfinished(self) -> None:
        """Delete the files of processes that ended while they wrote. Those that are written now may go meanwhile."""
        for path in self._folder.iterdir():
            is_unfinished = path.suffix == ".claim" or path.suffix[1:].isdecimal()
            with contextlib.suppress(FileNotFoundError):
                if is_unfinished and is_left_unfinished(path):
                    path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.program"


def _lock(file: int) -> bool:
    """Lock a file until it is closed, or its process ends; False if another process or thread has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def sources_digest(*more: str) -> str:
    """Of the code that programs follow from, and `more` parts of it."""
    root, parts = Path(quire.__file__).parent, (*SOURCES, *more)
    files = [path for part in parts for path in ([root / part] if part.endswith(".py") else (root / part).rglob("*"))]
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.suffix in (".py", ".cc", ".h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def machine() -> str:
    """The features that code for this machine may rely on: its devices, and the instructions of its processor."""
    device = jax.devices()[0]
    processes = f"{jax.device_count()} of process {jax.process_index()} of {jax.process_count()}"
    parts = (instruction_set(), device.device_kind, processes, device.client.platform_version)
    return "\0".join((*parts, os.environ.get("XLA_FLAGS", "")))
