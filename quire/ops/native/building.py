"""Compiles the C++ operations."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax

FOLDER = Path(__file__).parent
# A row's numbers must not depend on the other rows, so the compiler may not reorder operations:
# no -ffast-math, no contraction.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-w")
FOR_THIS_PROCESSOR = ("-march=native",)
SOURCES = (
    "adapter_product.cc",
    "coded_product.cc",
    "convolution.cc",
    "float_product.cc",
    "tiled_attention.cc",
    "int8_product.cc",
    "norm.cc",
    "place_heads.cc",
    "recurrence.cc",
    "zeros.cc",
)
BUILD_TIMEOUT_S = 300


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def sources_text() -> str:
    """All that decides the library's code but the compiler and the processor."""
    texts = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cc", ".h")]
    return "\0".join([*texts, repr((FLAGS, SOURCES))])


def build(
    compiler: str,
    scratch: Path,
    to: Path,
    instructions: Sequence[str] = FOR_THIS_PROCESSOR,
    linking: Sequence[str] = (),
) -> None:
    """Compile every source side by side, for these instructions, and link them into one library."""
    include = f"-I{jax.ffi.include_dir()}"
    objects = [scratch / f"{source}.o" for source in SOURCES]
    running = [
        subprocess.Popen(
            [compiler, *FLAGS, *instructions, include, "-c", str(FOLDER / source), "-o", str(compiled)],
            stderr=subprocess.PIPE,
        )
        for source, compiled in zip(SOURCES, objects, strict=True)
    ]
    for process in running:
        _, said = process.communicate(timeout=BUILD_TIMEOUT_S)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, stderr=said)
    _run([compiler, "-shared", "-pthread", *linking, *map(str, objects), "-o", str(to)])


def compile_one(compiler: str, source: Path, to: Path, extra: Sequence[str]) -> None:
    """Compile one source for any processor of the architecture."""
    _run([compiler, *FLAGS, *extra, str(source), "-o", str(to)])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
