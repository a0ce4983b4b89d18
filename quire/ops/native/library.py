"""Builds and loads the C++ operations."""

import ctypes
import logging
import shutil
import subprocess
from pathlib import Path

import jax
import jaxlib.version

from quire.cache_folder import cache_folder
from quire.ops.native.library_store import LibraryFailed, LibraryStore
from quire.ops.native.processor import instruction_set

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# A row's numbers must not depend on how many rows are beside it, so no order of operations is the compiler's to choose:
# no -ffast-math, no contraction.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-w")
SOURCES = (
    "adapter_product.cc",
    "float_product.cc",
    "tiled_attention.cc",
    "int8_product.cc",
    "norm.cc",
    "place_heads.cc",
    "zeros.cc",
)
TARGETS = (
    "quire_adapter_product",
    "quire_add_rms_norm",
    "quire_float_grouped_product",
    "quire_float_product",
    "quire_tiled_attention",
    "quire_int8_gated_product",
    "quire_int8_product",
    "quire_layer_norm",
    "quire_place_heads",
    "quire_rms_norm",
    "quire_zeros",
)
TRIED = "quire_int8_pack"  # run once in another process before a new library is used
BUILD_TIMEOUT_S = 300
_opened: list[ctypes.CDLL | None] = []  # once it was tried: operations can be registered once in a process


def load(folder: Path | None = None) -> bool:
    """Register the operations with JAX; False where they cannot be built, which costs speed and nothing else.

    The first call in a process decides: `folder` is where it looks for the built library, and keeps it.
    """
    if not _opened:
        _opened.append(_open(folder))
    return _opened[0] is not None


def library() -> ctypes.CDLL | None:
    """The built library, once its operations are registered."""
    load()
    return _opened[0]


def _open(folder: Path | None) -> ctypes.CDLL | None:
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        log.info("no C++ compiler found: XLA runs in place of the native operations, which is slower")
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
        return None
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(built, target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return built


def _identity(compiler: str) -> list[str]:
    """All that decides the library's code."""
    texts = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cc", ".h")]
    status = Path(compiler).resolve().stat()  # asking it for its version would take longer than loading the library
    version = f"{status.st_size} {status.st_mtime_ns}"
    flags = repr((FLAGS, SOURCES))
    return [*texts, flags, compiler, version, instruction_set(), jaxlib.version.__version__]


def build(compiler: str, scratch: Path, to: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile every source side by side, with `extra` flags besides, and link them into one library."""
    include = f"-I{jax.ffi.include_dir()}"
    objects = [scratch / f"{source}.o" for source in SOURCES]
    running = [
        subprocess.Popen(
            [compiler, *FLAGS, *extra, include, "-c", str(FOLDER / source), "-o", str(compiled)],
            stderr=subprocess.PIPE,
        )
        for source, compiled in zip(SOURCES, objects, strict=True)
    ]
    for process in running:
        _, said = process.communicate(timeout=BUILD_TIMEOUT_S)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, stderr=said)
    link = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(to)]
    subprocess.run(link, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
