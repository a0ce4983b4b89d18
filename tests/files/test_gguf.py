import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidCheckpoint, QuireError, UnsupportedModel
from quire.files.gguf import _BLOCKS, read_header, read_metadata
from tests.files.gguf_writing import embedding, write_gguf

VALUES = {
    "text": "naïve 漢字 🙂",
    "flag": True,
    "count": 7,
    "ratio": 0.5,
    "tokens": ["a", "", "é", "<|im_end|>"],
    "types": [1, 2, 3],
    "scores": [0.5, -1.0],
    "flags": [True, False],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = embedding() | {"output_norm.weight": (np.ones(256, np.float32), "F16")}
    tensors["blk.0.attn_q.weight"] = (np.ones((4, 256), np.float32), "Q8_0")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", "llama", VALUES, tensors)


def test_metadata_is_what_was_written(file: Path) -> None:
    expected = {f"llama.{key}": value for key, value in VALUES.items()}
    assert read_metadata(file) == expected | {"general.architecture": "llama"}


def test_every_kind_of_number_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "n.gguf", "llama")
    low = {"int8": -128, "int16": -(2**15), "int32": -(2**31), "int64": -(2**63), "float32": -0.25, "float64": 0.1}
    high = {"uint8": 255, "uint16": 2**16 - 1, "uint32": 2**32 - 1, "uint64": 2**64 - 1}
    for kind, value in (low | high).items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_metadata(tmp_path / "n.gguf") == low | high | {"general.architecture": "llama"}


def test_the_header_agrees_with_the_reader_of_the_gguf_package(file: Path) -> None:
    header = read_header(file)
    reader = gguf.GGUFReader(file)
    found = {t.name: (t.type, t.shape[::-1], t.offset, t.num_bytes) for t in header.tensors.values()}
    assert found == {
        t.name: (t.tensor_type.name, tuple(t.shape.tolist()), t.data_offset, t.n_bytes) for t in reader.tensors
    }
    assert header.metadata == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }


@given(st.data())
def test_a_file_cut_anywhere_is_reported_by_name(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    header_end = min(tensor.offset for tensor in read_header(file).tensors.values())
    last = max(tensor.offset + tensor.num_bytes for tensor in read_header(file).tensors.values())
    # Often in the header, where the structure is.
    length = data.draw(st.integers(0, header_end) | st.integers(0, last - 1))
    cut = file.parent / "cut.gguf"
    cut.write_bytes(whole[:length])
    with pytest.raises(InvalidCheckpoint, match=r"cut\.gguf"):
        read_header(cut)


@given(st.data())
def test_damage_is_an_error_of_ours_or_harmless(file: Path, data: st.DataObject) -> None:
    whole = bytearray(file.read_bytes())
    header_end = min(tensor.offset for tensor in read_header(file).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    damaged = file.parent / "damaged.gguf"
    damaged.write_bytes(whole)
    try:
        read_header(damaged)
    except QuireError as error:
        assert "damaged.gguf" in str(error)  # noqa: PT017 - no error is fine too


def test_truncated_tensors_are_all_named(file: Path, tmp_path: Path) -> None:
    header = read_header(file)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: header.tensors["output_norm.weight"].offset + 1])
    with pytest.raises(
        InvalidCheckpoint, match=r"2 tensors pass the end .*output_norm\.weight, blk\.0\.attn_q\.weight"
    ):
        read_header(cut)


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (b"", InvalidCheckpoint, "empty"),
        (b"PK\x03\x04" + bytes(60), InvalidCheckpoint, "not a GGUF file: it begins with b'PK"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), UnsupportedModel, "GGUF version 1 is not read"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), UnsupportedModel, "big-endian"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, start: bytes, error: type[QuireError], message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(start)
    with pytest.raises(error, match=message):
        read_metadata(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"gone\.gguf: no such file"):
        read_metadata(tmp_path / "gone.gguf")


def test_blocks_have_the_sizes_that_the_library_has() -> None:
    for number, (name, *sizes) in _BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, tuple(sizes)) == (name, tuple(gguf.GGML_QUANT_SIZES[kind]))
