"""Builds and loads the C++ operations."""

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import jax

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-w")
# Each source with flags of its own. -ffast-math lets sums be vectorised; infinities are used, so they must go on
# working. Without contraction the same operations are done for every number of rows.
SOURCES = {
    "grouped_attention.cc": ("-ffast-math", "-fno-finite-math-only"),
    "place_heads.cc": ("-ffast-math", "-fno-finite-math-only"),
    "int8_product.cc": ("-ffp-contract=off",),
}
TARGETS = ("quire_grouped_attention", "quire_place_heads", "quire_int8_product", "quire_int8_gated_product")
BUILD_TIMEOUT_S = 300


def load() -> bool:
    """Register the operations with JAX; False where they cannot be built, which costs speed and nothing else."""
    return library() is not None


@cache
def library() -> ctypes.CDLL | None:
    """What was built, once its operations are registered."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        log.info("no C++ compiler found: XLA runs in place of the native operations, which is slower")
        return None
    try:
        built = ctypes.cdll.LoadLibrary(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-500:]
        log.warning("the native operations cannot be built, XLA runs in their place: %s %s", error, said)
        return None
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(built, target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return built


def _built(compiler: str) -> Path:
    """The library, built unless it is there: kept by its sources, compiler and machine."""
    texts = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cc", ".h")]
    parts = (*texts, compiler, repr((FLAGS, SOURCES)), platform.machine(), platform.processor(), jax.__version__)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path("~/.cache/quire/native").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            build(compiler, Path(scratch), Path(scratch) / "library.so")
            (Path(scratch) / "library.so").replace(path)
    return path


def build(compiler: str, scratch: Path, to: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile every source side by side, with `extra` flags besides their own, and link them into one library."""
    include = f"-I{jax.ffi.include_dir()}"
    objects = [scratch / f"{source}.o" for source in SOURCES]
    running = [
        subprocess.Popen(
            [compiler, *FLAGS, *flags, *extra, include, "-c", str(FOLDER / source), "-o", str(compiled)],
            stderr=subprocess.PIPE,
        )
        for (source, flags), compiled in zip(SOURCES.items(), objects, strict=True)
    ]
    for process in running:
        _, said = process.communicate(timeout=BUILD_TIMEOUT_S)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, stderr=said)
    # Linked apart and without -ffast-math, with which loading the library would set the whole process to take the
    # smallest numbers for zero.
    link = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(to)]
    subprocess.run(link, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
