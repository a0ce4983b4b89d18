"""Loads the C++ operations: from a library that was built ahead, or from one that is built here on first use."""

import ctypes
import logging
import subprocess
from pathlib import Path

import jax
import jaxlib.version

from quire.cache_folder import cache_folder
from quire.ops.native import ahead
from quire.ops.native.building import FOR_THIS_PROCESSOR, build, find_compiler, sources_text
from quire.ops.native.library_store import LibraryFailed, LibraryStore
from quire.ops.native.processor import instruction_set

log = logging.getLogger(__name__)

TARGETS = (
    "quire_adapter_product",
    "quire_add_rms_norm",
    "quire_coded_product",
    "quire_convolve",
    "quire_float_grouped_product",
    "quire_float_product",
    "quire_tiled_attention",
    "quire_coded_attention",
    "quire_int8_gated_product",
    "quire_int8_product",
    "quire_layer_norm",
    "quire_place_heads",
    "quire_recur",
    "quire_rms_norm",
    "quire_zeros",
)
TRIED = "quire_int8_pack"  # run once in another process before a new library is used
_opened: list[ctypes.CDLL | None] = []  # once it was tried: operations can be registered once in a process
_described: list[str] = []  # the same in words


def load(folder: Path | None = None, built_ahead: Path = ahead.BUILT) -> bool:
    """Register the operations with JAX; False where there are none, which costs speed and nothing else.

    The first call in a process decides: one of the libraries that were `built_ahead`, if there are any for this
    processor, else one in `folder`, where it is built and kept.
    """
    if not _opened:
        _opened.append(_open(folder, built_ahead))
    return _opened[0] is not None


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
            return _register(opened, f"built ahead for {prebuilt.level} ({prebuilt.path})")
    return _open_built_here(folder)


def _open_built_here(folder: Path | None) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler found: XLA runs in place of the native operations, which is slower")
        _described[:] = ["none: there is no C++ compiler, so XLA runs in its place, which is slower"]
        return None
    folder = folder or cache_folder() / "native"
    try:
        store = LibraryStore(folder, _identity(compiler))
        built = store.open(lambda scratch, to: build(compiler, scratch, to), TARGETS, TRIED)
    except (OSError, subprocess.SubprocessError, LibraryFailed) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-500:]
        log.warning(
            "the native library cannot be built in %s, XLA runs in its place, which is slower: %s %s",
            folder, error, said,
        )  # fmt: skip
        _described[:] = ["none: it cannot be built, so XLA runs in its place, which is slower"]
        return None
    return _register(built, f"built here by {compiler} for this processor ({folder})")


def _register(opened: ctypes.CDLL, described: str) -> ctypes.CDLL:
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(opened, target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    _described[:] = [described]
    return opened


def _identity(compiler: str) -> list[str]:
    """All that decides the code of a library that is built here."""
    status = Path(compiler).resolve().stat()  # asking it for its version would take longer than loading the library
    version = f"{status.st_size} {status.st_mtime_ns}"
    return [sources_text(), *FOR_THIS_PROCESSOR, compiler, version, instruction_set(), jaxlib.version.__version__]
