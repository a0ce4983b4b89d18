"""Libraries that were built ahead: chosen by what the processor and the system let programs use."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.native import ahead
from quire.ops.native.building import FOLDER, compile_one, find_compiler
from tests.ops.empty_operations import build_empty_operations

COMPILER = find_compiler() or ""
needs_compiler = pytest.mark.skipif(not COMPILER or not ahead.levels(), reason="there is no C++ compiler")
FLAGS_IN_CPUINFO = {"avx2": "avx2", "avx512-vnni": "avx512_vnni", "dotprod": "asimddp"}

LOADS = """
import sys
from pathlib import Path
from quire.ops.native import library
print(library.load(Path(sys.argv[1]), Path(sys.argv[2])), library.description())
"""


def loads(cache: Path, built: Path, path: Path) -> str:
    """A process of its own, with these programs on its path."""
    command = [sys.executable, "-c", LOADS, str(cache), str(built)]
    environment = {**os.environ, "PATH": str(path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """The folder of a wheel: the probe, and a small library in place of that of each level."""
    folder = tmp_path / "built"
    folder.mkdir()
    compile_one(COMPILER, FOLDER / "probe.cc", folder / ahead.file_name("probe"), ("-shared", *ahead.LINKING))
    build_empty_operations(tmp_path / "empty.so")
    for level in ahead.levels():
        shutil.copy(tmp_path / "empty.so", folder / ahead.file_name(level.name))
    return folder


@needs_compiler
def test_a_library_that_was_built_ahead_needs_no_compiler(tmp_path: Path, built: Path) -> None:
    best = ahead.find(built)
    assert best is not None
    said = loads(tmp_path / "cache", built, tmp_path)
    assert said == f"True built ahead for {best.level} ({best.path})\n"
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_the_best_level_is_taken_of_those_that_are_there(built: Path) -> None:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    usable = [level.name for level in ahead.levels() if FLAGS_IN_CPUINFO[level.name] in cpuinfo]
    for level in usable:  # the best is removed each time
        found = ahead.find(built)
        assert found is not None
        assert found.level == level
        found.path.unlink()
    assert ahead.find(built) is None


@needs_compiler
def test_a_library_of_other_sources_is_not_taken(tmp_path: Path, built: Path) -> None:
    for path in built.iterdir():
        path.rename(built / f"{path.stem}0.so")
    assert ahead.find(built) is None
    assert loads(tmp_path / "cache", built, tmp_path).startswith("False none: there is no C++ compiler")


@needs_compiler
def test_one_that_cannot_be_loaded_is_done_without(tmp_path: Path, built: Path) -> None:
    for level in ahead.levels():
        (built / ahead.file_name(level.name)).write_bytes(b"")
    assert loads(tmp_path / "cache", built, tmp_path).startswith("False none: there is no C++ compiler")


def test_every_architecture_has_its_levels_and_others_have_none() -> None:
    assert [level.name for level in ahead.levels("x86_64")] == ["avx512-vnni", "avx2"]
    assert [level.name for level in ahead.levels("aarch64")] == ["dotprod"]
    assert not ahead.levels("riscv64")
    assert all("amx" not in flag for one in ahead.LEVELS.values() for level in one for flag in level.flags)
    assert platform.machine() not in ahead.LEVELS or ahead.levels()
