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

SOURCE = Path(__file__).with_name("grouped_attention.cc")
# -ffast-math lets sums be vectorised; infinities are used, so they must go on working.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-w")
TARGETS = ("quire_grouped_attention",)
BUILD_TIMEOUT_S = 300


@cache
def load() -> bool:
    """Register the operations with JAX; False where they cannot be built, which costs speed and nothing else."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        log.info("no C++ compiler found: attention runs in XLA, which is slower")
        return False
    try:
        library = ctypes.cdll.LoadLibrary(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-500:]
        log.warning("the native operations cannot be built, XLA runs in their place: %s %s", error, said)
        return False
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(library, target))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return True


def _built(compiler: str) -> Path:
    """The library, built unless it is there: kept by its source, compiler and machine."""
    parts = (SOURCE.read_text(), compiler, " ".join(FLAGS), platform.machine(), platform.processor(), jax.__version__)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path("~/.cache/quire/native").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "library.so"
            compiled = Path(scratch) / "library.o"
            # Linked apart and without -ffast-math, with which loading the library would set the whole process to take
            # the smallest numbers for zero.
            for command in (
                [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", "-c", str(SOURCE), "-o", str(compiled)],
                [compiler, "-shared", str(compiled), "-o", str(made)],
            ):
                subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
            made.replace(path)
    return path
