"""Loads the C++ operations: from a library that was built ahead, or from one that is built here on first use."""

import ctypes
import logging
import re
import subprocess
from pathlib import Path
from threading import Lock

import jax
import jaxlib.version

from quire.files.cache_folder import cache_folder
from quire.ops.native import ahead
from quire.ops.native.building import (
    BASE,
    FOR_THIS_PROCESSOR,
    PARTS,
    WHOLE,
    Part,
    build,
    find_compiler,
    sources_text,
)
from quire.ops.native.library_store import LibraryFailed, LibraryStore
from quire.ops.native.processor import instruction_set

log = logging.getLogger(__name__)

TRIED = "quire_int8_pack"  # run once in another process before a new library is used
_opened: list[ctypes.CDLL | None] = []  # once it was tried: operations can be registered once in a process
_described: list[str] = []  # the same in words
_unbuilt: dict[str, tuple[str, LibraryStore]] = {}  # by name, parts that no program has needed: compiler and place
_failed: set[str] = set()  # parts that cannot be built here
_building = Lock()


def load(folder: Path | None = None, built_ahead: Path = ahead.BUILT) -> bool:
    """Register the operations with JAX; False where there are none, which costs speed and nothing else.

    The first call in a process decides: one of the libraries that were `built_ahead`, if there are any for this
    processor, else one in `folder`, where it is built and kept.
    """
    if not _opened:
        _opened.append(_open(folder, built_ahead))
    return _opened[0] is not None


def need(part: str) -> bool:
    """Register the operations of a part, which is built if it never was; False where that fails, so that XLA has to
    run in its place. Called where a program is traced; a program that is kept on disk has its parts there too."""
    with _building:
        if part in _unbuilt:
            log.info("the native library's part for %s is built, which is done once", part)
            _add_part(part, *_unbuilt.pop(part))
        return part not in _failed


def need_operation(error: str) -> bool:
    """For a kept program that cannot be loaded, since this process lacks an operation. True if the part of the library
    that has it is there now."""
    found = re.search(r"No FFI handler registered for (\w+)", error)
    parts = [name for name, part in PARTS.items() if found is not None and found[1] in part.targets]
    return bool(parts) and need(parts[0])


def has_failed_parts() -> bool:
    """True if programs may have been traced without operations that another start has."""
    return bool(_failed)


def library() -> ctypes.CDLL | None:
    """The built library, once its operations are registered."""
    load()
    return _opened[0]


def description() -> str:
    """The library in use, for the log and `quire doctor`."""
    load()
    return _described[0]


def _open(folder: Path | None, built_ahead: Path) -> ctypes.CDLL | None:
    prebuilt = ahead.find(built_ahead)
    if prebuilt is not None:
        try:
            opened = ctypes.CDLL(str(prebuilt.path))
        except OSError as error:
            log.warning("the native library that was built ahead cannot be loaded, and is built here: %s", error)
        else:
            _described[:] = [f"built ahead for {prebuilt.level} ({prebuilt.path})"]
            return _register(opened, WHOLE)
    return _open_built_here(folder)


def _open_built_here(folder: Path | None) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler found: XLA runs in place of the native operations, which is slower")
        _described[:] = ["none: there is no C++ compiler, so XLA runs in its place, which is slower"]
        return None
    folder = folder or cache_folder() / "native"
    try:
        identity = _identity(compiler)
        built = _open_part(compiler, LibraryStore(folder, identity), BASE, TRIED)
        for name in PARTS:
            store = LibraryStore(folder, [*identity, name])
            if store.find() is None:
                _unbuilt[name] = compiler, store
            else:
                _add_part(name, compiler, store)
    except (OSError, subprocess.SubprocessError, LibraryFailed) as error:
        log.warning(
            "the native library cannot be built in %s, XLA runs in its place, which is slower: %s %s",
            folder, error, _said(error),
        )  # fmt: skip
        _described[:] = ["none: it cannot be built, so XLA runs in its place, which is slower"]
        return None
    _described[:] = [f"built here by {compiler} for this processor ({folder})"]
    return _register(built, BASE)


def _add_part(name: str, compiler: str, store: LibraryStore) -> None:
    """Register a part that is kept, or build it first. The others are used without it."""
    try:
        _register(_open_part(compiler, store, PARTS[name]), PARTS[name])
    except (OSError, subprocess.SubprocessError, LibraryFailed) as error:
        _failed.add(name)
        log.warning(
            "the native library's part for %s cannot be built or loaded, XLA runs in its place, which is slower: %s %s",
            name, error, _said(error),
        )  # fmt: skip


def _open_part(compiler: str, store: LibraryStore, part: Part, tried: str = "") -> ctypes.CDLL:
    return store.open(lambda scratch, to: build(compiler, scratch, to, sources=part.sources), part.targets, tried)


def _register(opened: ctypes.CDLL, part: Part) -> ctypes.CDLL:
    for target in part.targets:
        handler = jax.ffi.pycapsule(getattr(opened, target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return opened


def _said(error: Exception) -> str:
    """The end of what the compiler wrote."""
    written: bytes = getattr(error, "stderr", None) or b""
    return written.decode(errors="replace")[-500:]


def _identity(compiler: str) -> list[str]:
    """All that decides the code of a library that is built here."""
    status = Path(compiler).resolve().stat()  # asking it for its version would take longer than loading the library
    version = f"{status.st_size} {status.st_mtime_ns}"
    return [sources_text(), *FOR_THIS_PROCESSOR, compiler, version, instruction_set(), jaxlib.version.__version__]
