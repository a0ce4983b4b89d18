"""Packed weights on disk: the same bits as freshly packed ones, and any damage leads to packing again."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from quire.files.array_file import ALIGNMENT, DamagedFile, read_arrays, write_arrays
from quire.files.cache_folder import UNFINISHED_S
from quire.models.checkpoint import load_weights
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.models.weight_store import KEPT_FILES, WeightStore, kept_bytes
from quire.ops.native import int8_product
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors

pytestmark = pytest.mark.skipif(not int8_product.is_fast(), reason="weights are packed for the native kernel alone")

MODEL = build_model(CASES["llama-biases"])


def unwanted() -> ParamTree:
    raise AssertionError("packed again")


def packed(name: str = "llama-biases") -> ParamTree:
    model = build_model(CASES[name])
    return load_weights(model, NamedTensors(model), dtype="float32", quantize="int8")


def store_in(folder: Path, *, code: str = "code") -> WeightStore:
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        checkpoint.write_text("weights")
    return WeightStore(folder / "weights", [checkpoint], [code])


def kept_in(folder: Path) -> Path:
    """The file of a store that has kept the model."""
    store = store_in(folder)
    store.load(MODEL, packed)
    assert store.saving is not None
    store.saving.join()
    (path,) = (folder / "weights").iterdir()
    return path


def same(first: ParamTree, second: ParamTree) -> bool:
    ours, theirs = jax.tree.flatten(first), jax.tree.flatten(second)
    assert ours[1] == theirs[1]
    return all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(ours[0], theirs[0], strict=True)
    )


@pytest.mark.parametrize("name", ["llama-biases", "gpt2", "qwen3_moe", "gemma2"])
def test_kept_weights_have_the_bits_of_packed_ones(name: str, tmp_path: Path) -> None:
    model = build_model(CASES[name])
    store = store_in(tmp_path)
    fresh = store.load(model, lambda: packed(name))
    assert store.saving is not None
    store.saving.join()
    assert same(store_in(tmp_path).load(model, unwanted), fresh)


def test_kept_weights_are_used_where_they_lie(tmp_path: Path) -> None:
    path = kept_in(tmp_path)
    weights = store_in(tmp_path).load(MODEL, unwanted)
    largest = max(jax.tree.leaves(weights), key=lambda one: one.nbytes)
    at = largest.unsafe_buffer_pointer()
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in mappings]
    assert any(begin <= at < end for begin, end in ranges)


def shorten(data: bytearray) -> bytearray:
    return data[: len(data) // 2]


def change_middle(data: bytearray) -> bytearray:
    data[len(data) // 2] ^= 1
    return data


def swap_halves(data: bytearray) -> bytearray:
    middle = len(data) // 2
    return data[middle:] + data[:middle]


def change_header(data: bytearray) -> bytearray:
    data[60] ^= 1
    return data


def empty(data: bytearray) -> bytearray:
    return data[:0]


@pytest.mark.parametrize("damage", [shorten, change_middle, swap_halves, change_header, empty])
def test_a_damaged_file_is_packed_again(
    damage: Callable[[bytearray], bytearray], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept_in(tmp_path)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    store = store_in(tmp_path)
    assert same(store.load(MODEL, packed), packed())
    assert "made again" in caplog.text
    assert store.saving is not None
    store.saving.join()
    store_in(tmp_path).load(MODEL, unwanted)


def test_other_weights_under_the_name_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = kept_in(tmp_path)
    write_arrays(path, [np.zeros(3, np.float32)])
    assert same(store_in(tmp_path).load(MODEL, packed), packed())
    assert "other arrays" in caplog.text


def test_a_changed_checkpoint_and_changed_code_have_files_of_their_own(tmp_path: Path) -> None:
    kept_in(tmp_path)
    with pytest.raises(AssertionError, match="packed again"):
        store_in(tmp_path, code="other").load(MODEL, unwanted)
    (tmp_path / "checkpoint").write_text("others!")
    with pytest.raises(AssertionError, match="packed again"):
        store_in(tmp_path).load(MODEL, unwanted)


def test_starts_at_the_same_time_keep_one_whole_file(tmp_path: Path) -> None:
    stores = [store_in(tmp_path) for _ in range(4)]
    for store in stores:
        store.load(MODEL, packed)
    for store in stores:
        if store.saving is not None:
            store.saving.join()
    (path,) = (tmp_path / "weights").iterdir()
    assert kept_bytes(tmp_path / "weights") == path.stat().st_size
    store_in(tmp_path).load(MODEL, unwanted)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "weights").write_text("a file where the folder would be")
    store = store_in(tmp_path)
    assert same(store.load(MODEL, packed), packed())
    assert store.saving is not None
    store.saving.join()
    assert "cannot be kept" in caplog.text


def test_few_files_are_kept_and_unfinished_ones_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    old = time.time() - 2 * UNFINISHED_S
    names = [f"{number:032x}.weights" for number in range(KEPT_FILES + 2)]
    for age, name in enumerate([*names, "0.123", "a-note.txt"]):
        (folder / name).write_text("")
        os.utime(folder / name, (old - age, old - age))
    kept_in_folder = store_in(tmp_path)
    kept_in_folder.load(MODEL, packed)
    assert kept_in_folder.saving is not None
    kept_in_folder.saving.join()
    left = {path.name for path in folder.iterdir()}
    assert len(left) == KEPT_FILES + 1
    assert {*names[: KEPT_FILES - 1], "a-note.txt"} <= left


def test_files_of_a_clock_that_was_wrong_do_not_displace_the_last_used(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    used, future = time.time() - 60, time.time() + 1e8
    names = [f"{number:032x}.weights" for number in range(KEPT_FILES + 2)]
    for number, name in enumerate(names):
        (folder / name).write_text("")
        os.utime(folder / name, (used, used) if number < KEPT_FILES - 1 else (future, future))
    store = store_in(tmp_path)
    store.load(MODEL, packed)
    assert store.saving is not None
    store.saving.join()
    left = {path.name for path in folder.iterdir()}
    assert len(left) == KEPT_FILES
    assert {*names[: KEPT_FILES - 1]} <= left


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    arrays: list[Any] = [np.arange(7, dtype=np.int8), np.zeros((0, 3), np.float32), np.eye(5, dtype=np.float32)]
    write_arrays(tmp_path / "file", arrays)
    found = read_arrays(tmp_path / "file")
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(found, arrays, strict=True))
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in found)
    (tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(DamagedFile):
        read_arrays(tmp_path / "file")
