"""Libraries that are built ahead, for installations without a compiler: one for each level of instructions."""

import ctypes
import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quire.ops.native.building import FOLDER, build, compile_one, find_compiler, sources_text

BUILT = FOLDER / "built"  # in a wheel
KEY_LENGTH = 16
# No library of the machine that built them is needed but the C library.
LINKING = ("-static-libstdc++", "-static-libgcc")


class Level(NamedTuple):
    name: str  # as probe.cc knows it
    flags: tuple[str, ...]  # of the compiler


# The best first. AMX has none: processors list it where the system does not let programs use it.
LEVELS = {
    "x86_64": (
        Level(
            "avx512-vnni",
            ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
        ),
        Level("avx2", ("-mavx2", "-mfma", "-mf16c")),
    ),
    "aarch64": (Level("dotprod", ("-march=armv8.2-a+dotprod",)),),
}


class Prebuilt(NamedTuple):
    path: Path
    level: str


def levels(machine: str = "") -> Sequence[Level]:
    return LEVELS.get(machine or platform.machine(), ())


def find(folder: Path) -> Prebuilt | None:
    """The best library of these sources that runs here."""
    probe = folder / file_name("probe")
    if not probe.is_file():
        return None
    can_run = ctypes.CDLL(str(probe)).quire_can_run
    for level in levels():
        path = folder / file_name(level.name)
        if path.is_file() and can_run(level.name.encode()):
            return Prebuilt(path, level.name)
    return None


def build_all(folder: Path) -> list[Path]:
    """Build the library for every level of this machine's architecture, and the probe that chooses among them."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler found: g++, clang++ or c++ builds the native library")
    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / file_name("probe")]
    compile_one(compiler, FOLDER / "probe.cc", made[0], ("-shared", *LINKING))
    for level in levels():
        with tempfile.TemporaryDirectory() as scratch:
            made.append(folder / file_name(level.name))
            build(compiler, Path(scratch), made[-1], level.flags, LINKING)
    for path in made:
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=False)
    return made


def file_name(name: str) -> str:
    """A file name with a digest of the sources, so that a library of other sources is never used."""
    parts = (sources_text(), repr(LEVELS))
    return f"{name}-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:KEY_LENGTH]}.so"
