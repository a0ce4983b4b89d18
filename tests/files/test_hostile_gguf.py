"""GGUF files with numbers that would fill any memory: refused with the file's name and what is wrong."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidCheckpoint, QuireError
from quire.files.gguf import read_header, read_metadata
from quire.files.gguf_source import GGUFSource
from tests.models.test_hostile_files import little_memory

MANY = 2**63
_U32, _U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
UINT8, FLOAT32, STRING, ARRAY = 0, 6, 8, 9
F32, Q8_0 = 0, 8
NASTY_COUNTS = [0, 1, 2, 2**16, 2**20 + 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def start(num_tensors: int, num_pairs: int) -> bytes:
    return b"GGUF" + _U32(3) + _U64(num_tensors) + _U64(num_pairs)


def text(value: str) -> bytes:
    return _U64(len(value)) + value.encode()


def array(item_type: int, count: int) -> bytes:
    return text("a") + _U32(ARRAY) + _U32(item_type) + _U64(count)


def tensor(name: str, shape: list[int], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + _U32(len(shape)) + b"".join(map(_U64, shape)) + _U32(kind) + _U64(offset)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "pairs": (start(0, MANY), f"{MANY} pairs of metadata; at most"),
    "tensors": (start(MANY, 0), f"{MANY} tensors; at most"),
    "a string": (start(0, 1) + _U64(MANY) + b"abc", f"a string of {MANY} bytes"),
    "an array": (start(0, 1) + array(UINT8, MANY), f"{MANY} items of arrays"),
    "an array of strings": (start(0, 1) + array(STRING, 1000) + _U64(MANY), "string 0 of an array of 1000"),
    "an array of arrays": (
        start(0, 1) + array(ARRAY, 3) + (_U32(UINT8) + _U64(2**22) + bytes(2**22)) * 3,
        f"{2**22 + 3} items of arrays",
    ),
    "arrays that are deep": (start(0, 1) + array(ARRAY, 1) + (_U32(ARRAY) + _U64(1)) * 100, "nested more than"),
    "dimensions": (start(1, 0) + text("t") + _U32(2**31), "tensor t has 2147483648 dimensions"),
    "a size": (start(1, 0) + tensor("t", [MANY, MANY, MANY, MANY]), "1 tensors pass the end"),
    "no size": (start(1, 0) + tensor("t", [0, MANY]), "tensor t of shape [9223372036854775808, 0] is empty"),
    "a place": (start(1, 0) + tensor("t", [4], offset=2**64 - 1) + bytes(4096), "1 tensors pass the end"),
    "a block that is not filled": (start(1, 0) + tensor("t", [31], Q8_0) + bytes(4096), "has rows of 31"),
    "an unknown type": (start(1, 0) + tensor("t", [4], 2**31) + bytes(4096), "the unknown type 2147483648"),
    "shared bytes": (
        start(3, 0) + tensor("a", [32]) + tensor("c", [32], offset=128) + tensor("b", [32], offset=64) + bytes(4096),
        "tensors a and b overlap, at byte ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_fill_the_memory_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, said = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with little_memory(), pytest.raises(QuireError) as refused:
        read_header(path)
    assert "hostile.gguf" in refused.value.message
    assert said in refused.value.message


@pytest.mark.parametrize("item_type", [FLOAT32, STRING])
def test_a_file_that_is_mostly_a_hole_takes_no_memory(tmp_path: Path, item_type: int) -> None:
    """It takes no space on a disk, and each of its zeros would be a number, or an empty string."""
    path = tmp_path / "hostile.gguf"
    count = 2**21
    pairs = 2000
    with path.open("wb") as file:
        file.write(start(0, pairs))
        for number in range(pairs):
            key = text(f"key {number}")
            file.write(key + array(item_type, count)[len(text("a")) :])
            file.seek(count * (4 if item_type == FLOAT32 else 8), 1)
        file.truncate()
    assert path.stat().st_size > 2**33
    with little_memory(), pytest.raises(InvalidCheckpoint, match=r"hostile\.gguf.*(items of arrays|at most \d+)"):
        read_metadata(path)


PARTS: dict[str, Callable[[Any], bytes]] = {
    "strings": lambda count: array(STRING, count),
    "numbers": lambda count: array(FLOAT32, count),
    "arrays": lambda count: array(ARRAY, count),
    "text": lambda count: text("k") + _U32(STRING) + _U64(count),
    "tensor": lambda count: tensor("token_embd.weight", [count, count], offset=count),
}


@given(
    counts=st.tuples(st.sampled_from(NASTY_COUNTS), st.sampled_from(NASTY_COUNTS)),
    parts=st.lists(st.tuples(st.sampled_from(sorted(PARTS)), st.sampled_from(NASTY_COUNTS)), max_size=4),
    filling=st.binary(max_size=64),
)
def test_any_counts_are_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
    counts: tuple[int, int],
    parts: list[tuple[str, int]],
    filling: bytes,
) -> None:
    path = tmp_path_factory.getbasetemp() / "counts.gguf"
    path.write_bytes(start(*counts) + b"".join(PARTS[name](count) for name, count in parts) + filling)
    message = "counts.gguf"
    with little_memory():
        try:
            GGUFSource(path)
        except QuireError as error:
            message = error.message
    assert "counts.gguf" in message
