"""Programs on disk: found again, made again where they are damaged, and deleted when nobody uses them."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from quire.executor.program_store import KEPT_FOLDERS, ProgramStore


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
    assert "cannot be loaded and is made again" in caplog.text


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


def test_a_folder_that_cannot_be_written_is_said_and_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "programs").write_text("no folder")
    ProgramStore(tmp_path / "programs", "a model").forget_unused()
    assert "cannot be tidied up" in caplog.text
