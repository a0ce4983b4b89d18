"""The native library on disk: built once, never loaded damaged, and done without where it cannot be had."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.ops.native import library
from quire.ops.native.building import PARTS
from quire.ops.native.library_store import LibraryFailed, LibraryStore
from quire.ops.native.processor import instruction_set
from tests.ops.empty_operations import build_empty_operations
from tests.patience import WAIT_S

COMPILER = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++") or ""
needs_compiler = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")
ANSWER = 'extern "C" int answer() { return 42; }'
TRAP = 'extern "C" void pack() { __builtin_trap(); }'
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "bit flipped": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "zeros": lambda content: bytes(len(content)),
}


class Builds:
    """Builds a library of one source, and counts how often."""

    def __init__(self, source: str = ANSWER) -> None:
        self.source = source
        self.num_built = 0

    def __call__(self, scratch: Path, to: Path) -> None:
        self.num_built += 1
        (scratch / "source.cc").write_text(self.source)
        subprocess.run([COMPILER, "-shared", "-fPIC", str(scratch / "source.cc"), "-o", str(to)], check=True)


def answer(built: ctypes.CDLL) -> int:
    found: int = built.answer()
    return found


@needs_compiler
def test_a_library_is_built_once(tmp_path: Path) -> None:
    build = Builds()
    for _ in range(2):
        assert answer(LibraryStore(tmp_path, ["sources"]).open(build, ["answer"])) == 42
    assert build.num_built == 1
    assert len(list(tmp_path.iterdir())) == 1, "what it was built in is gone"


@needs_compiler
def test_what_a_process_left_that_ended_while_it_built_is_deleted(tmp_path: Path) -> None:
    for name in (".build-old", ".build-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.o").write_bytes(b"half")
    os.utime(tmp_path / ".build-old", (1e9, 1e9))
    LibraryStore(tmp_path, ["sources"]).open(Builds())
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".so"] == [".build-new"]


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_named_and_built_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, build = LibraryStore(tmp_path, ["sources"]), Builds()
    store.open(build)
    (path,) = tmp_path.glob("*.so")
    damaged = tmp_path / "damaged"
    damaged.write_bytes(DAMAGES[damage](path.read_bytes()))
    damaged.replace(path)  # not in place: this process has the good one mapped
    assert store.find() is None
    assert f"{path} is damaged" in caplog.text
    assert answer(store.open(build)) == 42
    assert build.num_built == 2
    assert store.find() == path


@needs_compiler
def test_a_library_for_other_instructions_is_not_taken(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    text = "processor\t: 0\nvendor_id\t: X\nmodel\t: 7\nflags\t\t: sse avx2{}\n\nprocessor\t: 1\nflags\t\t: sse\n"
    here.write_text(text.format(" avx512f"))
    there.write_text(text.format(""))
    assert "avx512f" in instruction_set(here)
    build = Builds()
    LibraryStore(tmp_path / "kept", [instruction_set(here)]).open(build)
    assert LibraryStore(tmp_path / "kept", [instruction_set(here)]).find() is not None
    assert LibraryStore(tmp_path / "kept", [instruction_set(there)]).find() is None


def test_a_machine_that_does_not_list_its_instructions_has_libraries_of_its_own(tmp_path: Path) -> None:
    assert os.uname().nodename in instruction_set(tmp_path / "missing")


@needs_compiler
@pytest.mark.parametrize("name", ["file", "a name that no folder can have" * 20])
def test_a_library_that_cannot_be_kept_is_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = tmp_path / name / "native"
    assert answer(LibraryStore(folder, ["sources"]).open(Builds())) == 42
    assert f"cannot be kept for the next start in {folder}" in caplog.text


@needs_compiler
def test_a_library_with_instructions_that_the_processor_lacks_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(LibraryFailed, match="ended with signal"):
        LibraryStore(tmp_path, ["sources"]).open(Builds(TRAP), pack="pack")
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_a_library_without_its_operations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LibraryFailed, match="undefined symbol: missing"):
        LibraryStore(tmp_path, ["sources"]).open(Builds(), ["missing"])


PROCESS = """
import sys
from pathlib import Path
from tests.ops.test_native_library import Builds, answer
from quire.ops.native import library
from quire.ops.native import library
from quire.ops.native.building import PARTS
from quire.ops.native.library_store import LibraryStore
print("ready", flush=True)
sys.stdin.readline()
assert answer(LibraryStore(Path(sys.argv[1]), ["sources"]).open(Builds())) == 42
"""


@needs_compiler
def test_processes_that_build_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    assert LibraryStore(tmp_path, ["sources"]).find() is not None
    assert all(path.suffix == ".so" for path in tmp_path.iterdir())


LOADS = """
import logging, sys
from pathlib import Path
logging.basicConfig()
from quire.ops.native import library
print(library.load(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
"""


def loads(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that loads the real library."""
    command = [sys.executable, "-c", LOADS, *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def quick_compiler(tmp_path: Path) -> Path:
    """A folder with a compiler that has the library ready, as long as there is a file beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    build_empty_operations(folder / "ready.so")
    script = f"""#!/bin/sh
for last; do :; done
case "$1" in
  --version) echo 1.0;;
  -shared) exec {shutil.which("cp")} {folder}/ready.so "$last";;
  *) : > "$last";;
esac
"""
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o700)
    return folder


@needs_compiler
def test_a_truncated_library_does_not_end_the_process(tmp_path: Path, quick_compiler: Path) -> None:
    folder = tmp_path / "native"
    ended = loads(str(folder), PATH=str(quick_compiler))
    assert (ended.stdout, ended.stderr) == ("True\n", "")
    (path,) = folder.iterdir()
    os.truncate(path, 4096)
    ended = loads(str(folder), PATH=str(quick_compiler))
    assert ended.stdout == "True\n"
    assert f"{path} is damaged" in ended.stderr
    os.truncate(path, 4096)
    (quick_compiler / "ready.so").unlink()
    ended = loads(str(folder), PATH=str(quick_compiler))
    assert ended.stdout == "False\n"
    assert f"{path} is damaged" in ended.stderr
    assert f"cannot be built in {folder}, XLA runs in its place" in ended.stderr


NEEDS = """
import sys
from pathlib import Path
from quire.ops.native import library
folder = Path(sys.argv[1])
assert library.load(folder)
for part in sys.argv[2:]:
    library.need(part)
    print(len(list(folder.glob("*.so"))), end=" ")
"""


@needs_compiler
def test_a_part_is_built_when_a_program_needs_it_and_is_there_from_then_on(
    tmp_path: Path, quick_compiler: Path
) -> None:
    def counts(*parts: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", NEEDS, str(tmp_path / "native"), *parts]
        environment = {**os.environ, "PATH": str(quick_compiler)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    assert counts("floats", "floats", "codes").stdout == "2 2 3 "
    (quick_compiler / "ready.so").unlink()
    ended = counts("codes", "floats")
    assert (ended.stdout, ended.stderr) == ("3 3 ", "")


@needs_compiler
def test_a_kept_part_that_cannot_be_loaded_leaves_the_others(tmp_path: Path, quick_compiler: Path) -> None:
    """It is whole, but refers to something that this system lacks."""
    folder = tmp_path / "native"
    command = [sys.executable, "-c", NEEDS, str(folder), "codes", "floats"]
    environment = {**os.environ, "PATH": str(quick_compiler)}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert made.stdout == "2 3 ", made.stderr
    ended = subprocess.run(
        [sys.executable, "-c", LOSES_A_PART, str(folder)], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert ended.stdout == "False True\n", ended.stderr
    assert "part for codes cannot be built or loaded, XLA runs in its place, which is slower: " in ended.stderr


LOSES_A_PART = """
import logging, sys
from pathlib import Path
logging.basicConfig()
from quire.ops.native import library
from quire.ops.native.building import find_compiler
from quire.ops.native.library_store import LibraryStore
folder = Path(sys.argv[1])
store = LibraryStore(folder, [*library._identity(find_compiler()), "codes"])
kept = store.find()
kept.write_bytes(b"not a library")
kept.rename(folder / f"{store._stem(kept)}.so")
assert library.load(folder)
print(library.need("codes"), library.need("floats"))
"""


FALLS_BACK = """
import logging, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from quire.executor.programs.store import ProgramStore
from quire.ops.weights.adapters import AdapterStack, add_products
from quire.ops.weights.coded import Coded
from quire.ops.kernels import NATIVE
from quire.ops.native import library
from quire.ops.weights.floats import NativeWeight
from quire.ops.recurrence import PLAIN, Recurrence
from quire.ops.slot_access import slot_access
logging.basicConfig()
folder = Path(sys.argv[1])
assert library.load(folder / "native")
from tests.ops.test_recurrence import SLOTS, places_of
x, sizes = jnp.arange(12.0).reshape(4, 3), jnp.array([1, 3], jnp.int32)
weights = jnp.arange(30.0).reshape(2, 5, 3)
kept = jax.jit(lambda x: NativeWeight(weights[0]).product(x)).lower(x).compile()
np.testing.assert_array_equal(kept(x), x @ weights[0].T)
own = jnp.concatenate([x[:1] @ weights[0].T, x[1:] @ weights[1].T])
np.testing.assert_array_equal(NativeWeight(weights).grouped_product(x, sizes), own)
codes = weights.astype(jnp.int8)[0]
coded = Coded(codes, jnp.full((5, 1), 0.5), None, None, None, None, (5, 3), 1, False, 8, 3, is_native=True)
np.testing.assert_array_equal(coded.product(x), x @ weights[0].T / 2)
stack = AdapterStack(jnp.ones((1, 1, 2, 3)), jnp.ones((1, 2, 5)), jnp.full(1, 2), ((5, 0),))
rows = jnp.array([0, 1, 0, 1])
added = NATIVE.adapter_product(own, x, rows, stack)
np.testing.assert_array_equal(added, add_products(own, x, rows, stack))
access = slot_access(*jax.tree.map(jnp.asarray, places_of({0: (0, 5)})), SLOTS)
count = len(access.slots)
inputs = jnp.ones((SLOTS + 1, 2, 1, 3))
values = jnp.ones((count, 1, 3))
arguments = values, jnp.ones((1, 3, 3)), None, inputs, access
for found, right in zip(NATIVE.recurrent.convolve(*arguments), PLAIN.convolve(*arguments), strict=True):
    np.testing.assert_array_equal(found, right)
tokens = Recurrence(values, values, jnp.ones((count, 1, 1, 3)), -jnp.ones((count, 1, 1)), jnp.ones((count, 1, 1)))
arguments = True, tokens, jnp.ones((SLOTS + 1, 1, 1, 3, 3)), access
for found, right in zip(NATIVE.recurrent.recur(*arguments), PLAIN.recur(*arguments), strict=True):
    np.testing.assert_array_equal(found, right)
ProgramStore(folder, "a model").save("slow", kept)
assert not list(folder.rglob("*.program")), "the next start could be faster"
"""


@needs_compiler
def test_xla_runs_in_the_place_of_a_part_that_cannot_be_built(tmp_path: Path, quick_compiler: Path) -> None:
    sources = "|".join(f"*/{source}" for part in PARTS.values() for source in part.sources)
    compiler = quick_compiler / "g++"
    refusal = f'for one; do case "$one" in {sources}) echo "$one: no" >&2; exit 1;; esac; done\n'
    compiler.write_text(compiler.read_text().replace("for last", f"{refusal}for last", 1))
    command = [sys.executable, "-c", FALLS_BACK, str(tmp_path)]
    environment = {**os.environ, "PATH": str(quick_compiler)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    for name, part in PARTS.items():
        said = (
            f"the native library's part for {name} cannot be built or loaded, XLA runs in its place, which is slower: "
        )
        assert ended.stderr.count(said) == 1
        assert f"{part.sources[0]}: no" in ended.stderr


def test_without_a_compiler_there_is_no_library_and_no_error(tmp_path: Path) -> None:
    ended = loads(str(tmp_path), PATH=str(tmp_path))
    assert (ended.stdout, ended.stderr) == ("False\n", "")


@needs_compiler
def test_without_a_home_folder_the_library_is_kept_among_temporary_files(tmp_path: Path, quick_compiler: Path) -> None:
    # "~" stands for a HOME that is not set, of a user that the system does not know: neither can be expanded.
    ended = loads(HOME="~", TMPDIR=str(tmp_path), PATH=str(quick_compiler))
    assert (ended.stdout, ended.stderr) == ("True\n", "")
    (folder,) = tmp_path.glob("quire-cache-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list((folder / "native").glob("*.so"))
    folder.chmod(0o777)  # another user could put files there, which would be run
    ended = loads(HOME="~", TMPDIR=str(tmp_path), PATH=str(quick_compiler))
    assert f"{folder} is open to other users: set --cache-dir" in ended.stderr


def test_a_kept_program_gets_the_part_that_it_lacks_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[str] = []
    monkeypatch.setattr(library, "need", lambda part: needed.append(part) or True)
    lacks = "NOT_FOUND: No FFI handler registered for {} on a platform Host (canonical host)"
    assert library.need_operation(lacks.format("quire_recur"))
    assert not library.need_operation(lacks.format("another_operation"))
    assert not library.need_operation("the file is damaged")
    assert needed == ["recurrence"]
