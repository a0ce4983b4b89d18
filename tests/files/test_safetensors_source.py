import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quire.errors import InvalidCheckpoint
from quire.files.safetensors_source import SafetensorsSource

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
    "c.weight": np.arange(8).reshape(4, 2).astype(ml_dtypes.bfloat16),
    "scalar": np.array(3.0, np.float32),
    "nothing": np.zeros((0, 4), np.float32),
}


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_sharded(folder: Path) -> dict[str, str]:
    shards = {
        "model-00001-of-00002.safetensors": ["a.weight", "nothing"],
        "model-00002-of-00002.safetensors": ["b.weight", "c.weight", "scalar"],
    }
    for file_name, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file_name)
    weight_map = {name: file_name for file_name, names in shards.items() for name in names}
    write_index(folder, weight_map)
    return weight_map


def write_single(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_tensors_are_what_was_written(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path)
    source = SafetensorsSource(tmp_path)
    assert {name: tuple(info) for name, info in source.tensors().items()} == {
        name: (values.shape, values.dtype.name) for name, values in TENSORS.items()
    }
    for name, values in TENSORS.items():
        read = source.read(name)
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values)


def test_an_index_decides_which_files_count(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"stray": np.ones(1, np.float32)}, tmp_path / "consolidated.safetensors")
    assert "stray" not in SafetensorsSource(tmp_path).tensors()


def test_a_single_file_of_any_name_is_found(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "weights.safetensors")
    assert set(SafetensorsSource(tmp_path).tensors()) == set(TENSORS)


def test_all_missing_shards_are_named(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    write_index(tmp_path, weight_map | {"d": "gone-1.safetensors", "e": "gone-2.safetensors"})
    with pytest.raises(InvalidCheckpoint, match=r"2 problems: gone-1\.safetensors: .* missing; gone-2\.safetensors: "):
        SafetensorsSource(tmp_path)


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "x" * 300})
    with pytest.raises(InvalidCheckpoint, match=r"1 problem: x+: named by .*, but missing"):
        SafetensorsSource(tmp_path)


def test_a_tensor_the_index_misplaces_is_named(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path)
    write_index(tmp_path, weight_map | {"d.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(InvalidCheckpoint, match=r"d\.weight: .* places it in model-00001-of-00002"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        InvalidCheckpoint, match=r"a\.weight: in both model-00001-of-00002\.safetensors and model-00002"
    ):
        SafetensorsSource(tmp_path)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "../secret.safetensors", "b": "/etc/secret.safetensors"})
    with pytest.raises(InvalidCheckpoint, match=r"outside the folder: \.\./secret\.safetensors, /etc/secret"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "{}"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors\.index\.json"):
        SafetensorsSource(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="no safetensors files"):
        SafetensorsSource(tmp_path)


def test_every_truncated_file_is_named_with_its_tensors(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidCheckpoint) as caught:
        SafetensorsSource(tmp_path)
    for file_name, tensor in (("model-00001-of-00002", "a.weight"), ("model-00002-of-00002", "b.weight")):
        assert re.search(rf"{file_name}\.safetensors: truncated: [^;]*{tensor}", str(caught.value))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_single(folder)
    return folder / "model.safetensors"


@given(st.data())
def test_a_file_cut_anywhere_is_reported_by_name(whole: Path, data: st.DataObject) -> None:
    content = whole.read_bytes()
    folder = whole.parent / "cut"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors: "):
        SafetensorsSource(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"not json", "not JSON"),
        (b"[]", "holds a list, not an object"),
        (b'{"a": {"dtype": "F32"}}', "entry of a is malformed"),
        (b'{"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}', "a has dtype 'F4'"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "does not fill its 4 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', "malformed"),
    ],
)
def test_a_broken_header_is_reported(tmp_path: Path, header: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(InvalidCheckpoint, match=f"model.safetensors: .*{message}"):
        SafetensorsSource(tmp_path)
