"""A native library whose operations do nothing: it takes a second to build, and registers as the real one does."""

from pathlib import Path

import jax

from quire.ops.native.building import FOLDER, WHOLE, compile_one, find_compiler

SOURCE = """
#include "operation.h"
static quire::Fault nothing() { return nullptr; }
extern "C" void quire_int8_pack(void*, long, long, long, void*) {}
"""


def build_empty_operations(to: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    source = to.with_suffix(".cc")
    source.write_text(SOURCE + "".join(f"QUIRE_OPERATION({target}, nothing)\n" for target in WHOLE.targets))
    compile_one(compiler, source, to, ("-O0", "-shared", f"-I{FOLDER}", f"-I{jax.ffi.include_dir()}"))
    source.unlink()
