"""Programs on disk: found again, made again where they are damaged, and deleted when nobody uses them."""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.serialize_executable import deserialize_and_load

from quire.executor.programs import store as program_store
from quire.executor.programs.store import KEPT_FOLDERS, ProgramStore
from quire.ops.gpu.hopper import mosaic
from tests.patience import WAIT_S
from tests.shared_programs import shared


def test_a_program_is_found_by_a_store_of_the_same_identity(tmp_path: Path) -> None:
    program = jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile()
    ProgramStore(tmp_path, "a model").save("add", program)
    found = ProgramStore(tmp_path, "a model").load("add")
    assert found is not None
    assert found(jnp.ones(3)).tolist() == [2, 2, 2]
    assert ProgramStore(tmp_path, "a model").load("subtract") is None
    assert ProgramStore(tmp_path, "another").load("add") is None


def test_a_damaged_program_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ProgramStore(tmp_path, "a model")
    store.save("add", jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile())
    (path,) = tmp_path.rglob("*.program")
    path.write_bytes(path.read_bytes()[:100])
    assert store.load("add") is None
    assert "is damaged and is made again" in caplog.text


def test_every_change_of_a_program_is_noticed_before_it_is_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte of its machine code could end the process, or change what it computes."""
    store = ProgramStore(tmp_path, "a model")
    store.save("add", jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile())
    (path,) = tmp_path.rglob("*.program")
    whole = path.read_bytes()
    places = [0, *range(1, len(whole), max(1, len(whole) // 50)), len(whole) - 1]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert store.load("add") is None
    assert len(caplog.messages) == len(places)
    path.write_bytes(whole + b"\0")
    assert store.load("add") is None
    path.write_bytes(whole)
    assert store.load("add") is not None


def test_a_program_whose_part_of_the_native_library_is_gone_is_read_when_that_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, built = ProgramStore(tmp_path, "a model"), []
    store.save("add", jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile())

    def load(*stored: Any) -> Any:
        if not built:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: No FFI handler registered for quire_float_product")
        return deserialize_and_load(*stored)

    monkeypatch.setattr(program_store, "deserialize_and_load", load)
    monkeypatch.setattr(program_store, "need_operation", lambda error: False)
    assert store.load("add") is None
    monkeypatch.setattr(program_store, "need_operation", lambda error: built.append(error) or True)
    found = store.load("add")
    assert found is not None
    assert found(jnp.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("has_kernels", [True, False])
def test_mosaic_is_loaded_before_a_program_with_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_kernels: bool
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(mosaic, "load_library", lambda: happened.append("library"))
    monkeypatch.setattr(program_store, "deserialize_and_load", lambda *_: happened.append("program"))
    store = ProgramStore(tmp_path, "of a test")
    name = "custom_call_target=mosaic_gpu_v2" if has_kernels else "custom_call_target=another"
    monkeypatch.setattr(program_store, "serialize", lambda program: (name,))
    store.save("one", None)
    store.load("one")
    assert happened == ["library"] * has_kernels + ["program"]


def test_what_many_others_were_used_after_is_deleted_if_it_is_ours(tmp_path: Path) -> None:
    ours = ProgramStore(tmp_path, "ours")
    ours.forget_unused()
    (folder,) = tmp_path.iterdir()
    now = folder.stat().st_mtime
    names = [f"{number:032x}" for number in range(KEPT_FOLDERS)]
    for age, name in enumerate([*names, "somebody's"], start=1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.program").touch()
        os.utime(tmp_path / name, (now - age, now - age))
    ours.forget_unused()
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, *names[:-1], "somebody's"}


def test_folders_of_a_clock_that_was_wrong_do_not_displace_the_one_in_use(tmp_path: Path) -> None:
    ours = ProgramStore(tmp_path, "ours")
    ours.forget_unused()
    (folder,) = tmp_path.iterdir()
    future = folder.stat().st_mtime + 1e8
    for number in range(KEPT_FOLDERS):
        (tmp_path / f"{number:032x}").mkdir()
        os.utime(tmp_path / f"{number:032x}", (future, future))
    ours.forget_unused()
    assert folder.exists()
    assert len(list(tmp_path.iterdir())) == KEPT_FOLDERS


def test_a_folder_that_cannot_be_written_is_said_and_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "programs").write_text("no folder")
    ProgramStore(tmp_path / "programs", "a model").forget_unused()
    assert "cannot be tidied up" in caplog.text


def test_what_jax_keeps_itself_is_not_kept_again(tmp_path: Path) -> None:
    """On a CPU a program that XLA has read and written again ends the step that runs it."""
    store = ProgramStore(tmp_path, "a model")
    for is_shared in (True, True, False):  # compiled, read, compiled
        with shared() if is_shared else nullcontext():
            store.save("double", jax.jit(lambda x: jnp.tanh(x) * 2).lower(jnp.zeros((3, 5))).compile())
        found = store.load("double")
        assert (found is None) == is_shared
    assert found is not None
    assert found(jnp.zeros((3, 5))).tolist() == [[0.0] * 5] * 3


SAVE_ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
from quire.executor.programs.store import ProgramStore
program = jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # a file of more bytes than this is refused half way
store = ProgramStore(Path(sys.argv[1]), "a model")
for name in ("add", "subtract", "divide"):
    store.save(name, program)
"""


def test_nothing_is_left_of_a_program_that_the_disk_has_no_room_for(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SAVE_ON_A_FULL_DISK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert ended.stderr.count("cannot be kept for the next start") == 1, "each is said"
    assert "[Errno 27] File too large" in ended.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_a_process_left_half_written_is_deleted_once_it_is_old(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path, "ours")
    store.forget_unused()
    (folder,) = tmp_path.iterdir()
    old, new, program = folder / "add.123", folder / "add.456", folder / "add.program"
    for path in (old, new, program):
        path.write_bytes(b"a")
    for path in (old, program):
        os.utime(path, (1, 1))
    store.forget_unused()
    assert {*folder.iterdir()} == {new, program}


def add_one() -> Any:
    return jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile()


def test_engines_that_want_a_program_at_the_same_time_compile_it_once(tmp_path: Path) -> None:
    num_compiled = 0
    others: list[Future[tuple[Any, bool]]] = []

    def wait_for_it() -> tuple[Any, bool]:
        return ProgramStore(tmp_path, "a model").make("add", lambda: pytest.fail("it is compiled twice"))

    with ThreadPoolExecutor(3) as pool:

        def compile() -> Any:
            nonlocal num_compiled
            num_compiled += 1
            others.extend(pool.submit(wait_for_it) for _ in range(3))
            return add_one()

        program, was_kept = ProgramStore(tmp_path, "a model").make("add", compile)
        found = [other.result(WAIT_S) for other in others]
    assert (num_compiled, was_kept) == (1, False)
    assert [is_kept for _, is_kept in found] == [True] * 3
    assert all(one(jnp.ones(3)).tolist() == [2, 2, 2] for one in (program, *(one for one, _ in found)))
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".program"], "no claim is left"


CLAIMS = """
import sys, time
from pathlib import Path
from quire.executor.programs.store import ProgramStore
def compile():
    print("compiling", flush=True)
    sys.stdin.read()
ProgramStore(Path(sys.argv[1]), "a model").make("add", compile)
"""


def test_a_program_is_compiled_when_the_process_that_began_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIMS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "compiling\n"
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(ProgramStore(tmp_path, "a model").make, "add", add_one)
            assert not making.done()
            other.kill()
            program, was_kept = making.result(WAIT_S)
    assert not was_kept
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_process_that_stands_still_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "MAX_CLAIM_S", 0.0)
    store = ProgramStore(tmp_path, "a model")

    def compile_within() -> Any:
        return store.make("add", add_one)[0]

    program, was_kept = store.make("add", compile_within)
    assert not was_kept
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_damaged_program_is_compiled_again(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path, "a model")
    store.make("add", add_one)
    (path,) = tmp_path.rglob("*.program")
    path.write_bytes(b"")
    assert store.make("add", add_one)[1] is False
    assert store.make("add", add_one)[1] is True


def test_a_program_is_made_where_no_file_can_be_locked(tmp_path: Path) -> None:
    (tmp_path / "programs").write_text("no folder")
    program, was_kept = ProgramStore(tmp_path / "programs", "a model").make("add", add_one)
    assert not was_kept
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_program_that_cannot_be_read_is_made(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path, "a model")
    (tmp_path / store.digest / "add.program").mkdir(parents=True)  # no user may read it as a file
    program, was_kept = store.make("add", add_one)
    assert not was_kept
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_program_is_made_where_a_folder_cannot_be_looked_into(tmp_path: Path) -> None:
    """As another user's; but the user of a test may read everything, so its name is one that the system refuses."""
    store = ProgramStore(tmp_path / ("programs" * 40), "a model")
    assert store.is_empty
    assert not store.has("add")
    assert store.load("add") is None
    program, was_kept = store.make("add", add_one)
    assert not was_kept
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_program_that_cannot_be_made_leaves_no_claim(tmp_path: Path) -> None:
    def fails() -> Any:
        raise ValueError("XLA refuses it")

    store = ProgramStore(tmp_path, "a model")
    with pytest.raises(ValueError, match="XLA refuses it"):
        store.make("add", fails)
    assert list(tmp_path.rglob("*.claim")) == []


def test_nothing_is_claimed_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_store, "has_failed_parts", lambda: True)
    store = ProgramStore(tmp_path, "a model")
    program, was_kept = store.make("add", lambda: jax.jit(lambda x: x + 1).lower(jnp.zeros(3)).compile())
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]
    assert not was_kept
    assert list(tmp_path.rglob("*.*")) == []


def test_a_library_that_another_thread_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs are loaded on several threads, and none may find half of it."""
    name = "slow_library_of_a_test"
    (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.2)\nis_whole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(mosaic, "LIBRARY", name)
    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(loaded_whole, name) for _ in range(8)]]
    assert found == [True] * 8
    monkeypatch.setattr(mosaic, "LIBRARY", "no_such_library_anywhere")
    assert not mosaic.load_library()


def loaded_whole(name: str) -> bool:
    return mosaic.load_library() and hasattr(sys.modules[name], "is_whole")
