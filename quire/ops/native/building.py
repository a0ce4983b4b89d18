"""Compiles the C++ operations."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

FOLDER = Path(__file__).parent
# A row's numbers must not depend on the other rows, so the compiler may not reorder operations:
# no -ffast-math, no contraction.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-w")
FOR_THIS_PROCESSOR = ("-march=native",)


class Part(NamedTuple):
    """Sources, and the operations that they define."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]


# The operations of most models, with which a server can begin.
BASE = Part(
    ("tiled_attention.cc", "int8_product.cc", "norm.cc", "place_heads.cc", "sampling.cc", "zeros.cc"),
    (
        "quire_add_rms_norm",
        "quire_tiled_attention",
        "quire_coded_attention",
        "quire_filter_cuts",
        "quire_highest",
        "quire_int8_gated_product",
        "quire_int8_grouped_product",
        "quire_int8_product",
        "quire_layer_norm",
        "quire_place_codes",
        "quire_place_heads",
        "quire_rms_norm",
        "quire_zeros",
    ),
)
# The others, which are built when a program needs them.
PARTS = {
    "adapters": Part(("adapter_product.cc",), ("quire_adapter_product",)),
    "codes": Part(("coded_product.cc",), ("quire_coded_product",)),
    "floats": Part(("float_product.cc",), ("quire_float_grouped_product", "quire_float_product")),
    "recurrence": Part(("convolution.cc", "recurrence.cc"), ("quire_convolve", "quire_recur")),
}
WHOLE = Part(*(tuple(one for part in (BASE, *PARTS.values()) for one in part[field]) for field in range(2)))
BUILD_TIMEOUT_S = 300


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def sources_text() -> str:
    """All that decides the library's code but the compiler and the processor."""
    texts = [path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cc", ".h")]
    return "\0".join([*texts, repr((FLAGS, WHOLE.sources))])


def build(
    compiler: str,
    scratch: Path,
    to: Path,
    instructions: Sequence[str] = FOR_THIS_PROCESSOR,
    linking: Sequence[str] = (),
    sources: Sequence[str] = WHOLE.sources,
) -> None:
    """Compile the sources side by side, for these instructions, and link them into one library."""
    include = f"-I{jax.ffi.include_dir()}"
    objects = [scratch / f"{source}.o" for source in sources]
    running = [
        subprocess.Popen(
            [compiler, *FLAGS, *instructions, include, "-c", str(FOLDER / source), "-o", str(compiled)],
            stderr=subprocess.PIPE,
        )
        for source, compiled in zip(sources, objects, strict=True)
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
