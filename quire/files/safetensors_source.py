"""Weights in safetensors files: one file, or several with an index.

Headers are parsed here and data is mapped per tensor: the library's reader copies every tensor it hands out, and keeps
whole files mapped while one is open.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from os.path import exists
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import InvalidCheckpoint, listed, shown
from quire.files.json_file import MAX_VOCABULARY_BYTES, parse_object, read_json
from quire.files.regular_file import open_regular
from quire.files.tensor_source import Array, TensorInfo, refuse_overlaps

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_HEADER_BYTES = 100_000_000  # of the format
MAX_HEADER_VALUES = 1 << 22  # a tensor has a dozen
_MAX_DIMENSIONS = 8
_MAX_NUMBER = 1 << 62
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U16": np.dtype("uint16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}


@dataclass(frozen=True)
class _Entry:
    path: Path
    info: TensorInfo
    dtype: np.dtype[Any]
    offset: int  # bytes from the start of the file


class SafetensorsSource:
    """The tensors of a folder, or of one `file` in it. Every entry lies inside its file, and no name occurs in two.

    Files must not change while they are mapped: the process would end where one becomes shorter. Those that may change
    are read with `read_copy`.
    """

    def __init__(self, folder: str | Path, file: str | None = None, max_header_bytes: int = MAX_HEADER_BYTES) -> None:
        path = Path(folder)
        self._entries = _read_folder(path) if file is None else _read_header(path / file, max_header_bytes)
        self._infos = {name: entry.info for name, entry in self._entries.items()}

    @property
    def files(self) -> list[Path]:
        return sorted({entry.path for entry in self._entries.values()})

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> Array:
        entry = self._entries[name]
        if prod(entry.info.shape) == 0:
            return np.zeros(entry.info.shape, entry.dtype)  # nothing can be mapped
        with open_regular(entry.path) as file:
            return np.memmap(file, entry.dtype, "r", entry.offset, entry.info.shape)

    def read_copy(self, name: str) -> Array:
        """Like `read`, as a copy in memory. Raises InvalidCheckpoint if the file has become shorter."""
        entry = self._entries[name]
        count = prod(entry.info.shape)
        try:
            with open_regular(entry.path) as file:
                file.seek(entry.offset)
                data = file.read(count * entry.dtype.itemsize)
        except OSError as error:
            raise InvalidCheckpoint(f"{entry.path}: cannot be read: {error.strerror}") from error
        if len(data) != count * entry.dtype.itemsize:
            raise InvalidCheckpoint(f"{entry.path}: it was changed while it was read; {name} is cut off")
        return np.frombuffer(data, entry.dtype).reshape(entry.info.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model; empty where there are none.

    An index decides. Without one, `model.safetensors`; without that, every safetensors file of the folder.
    """
    index = folder / INDEX_NAME
    if index.exists():
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    single = folder / SINGLE_NAME
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, MAX_VOCABULARY_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InvalidCheckpoint(f"{index}: weight_map is not a table from tensor names to file names")
    # An index may come from anywhere: it may name neighbours, not other places.
    strays = sorted({name for name in weight_map.values() if Path(name).name != name})
    if strays:
        raise InvalidCheckpoint(f"{index}: weight_map names files outside the folder: {listed(strays)}")
    return weight_map


def _read_folder(folder: Path) -> dict[str, _Entry]:
    """All entries, or one error that lists everything wrong with the files."""
    paths = weight_files(folder)
    if not paths:
        raise InvalidCheckpoint(f"{folder}: no safetensors files")
    problems: list[str] = []
    entries: dict[str, _Entry] = {}
    for path in paths:
        if not exists(path):  # False, too, of a name that no file can have
            problems.append(f"{path.name}: named by {INDEX_NAME}, but missing")
            continue
        try:
            found = _read_header(path)
        except InvalidCheckpoint as error:
            problems.append(str(error))
            continue
        for name, entry in found.items():
            if name in entries:
                problems.append(f"{name}: in both {entries[name].path.name} and {path.name}")
            entries[name] = entry
    index = folder / INDEX_NAME
    if index.exists() and not problems:
        for name, file_name in _weight_map(index).items():
            if name not in entries:
                problems.append(f"{name}: {INDEX_NAME} places it in {file_name}, which does not hold it")
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise InvalidCheckpoint(f"{folder}: {count}: {listed(problems, '; ')}")
    return entries


def _read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, _Entry]:
    try:
        file = open_regular(path)
    except OSError as error:
        raise InvalidCheckpoint(f"{path.name}: cannot be read: {error.strerror}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or 8 + header_bytes > size:
            raise InvalidCheckpoint(
                f"{path.name}: truncated, or not a safetensors file: {size} bytes do not hold its header"
            )
        if header_bytes > max_bytes:
            raise InvalidCheckpoint(f"{path.name}: its header has {header_bytes} bytes; at most {max_bytes} are read")
        text = file.read(header_bytes)
    header = parse_object(text, f"the header of {path.name}", MAX_HEADER_VALUES)
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries, truncated, places = {}, [], []
    for name, fields in header.items():
        entry, end = _entry(path, name, fields, data_start)
        entries[name] = entry
        places.append((entry.offset, end, name))
        if end > size:
            truncated.append(name)
    if truncated:
        raise InvalidCheckpoint(
            f"{path.name}: truncated: {len(truncated)} tensors pass the end at {size}: {listed(truncated)}"
        )
    refuse_overlaps(path.name, places)
    return entries


def _entry(path: Path, name: str, fields: Any, data_start: int) -> tuple[_Entry, int]:
    """One tensor, and where its data ends."""
    try:
        dtype_name, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidCheckpoint(f"{path.name}: the entry of {name} is malformed: {shown(fields)}") from error
    numbers = (*shape[: _MAX_DIMENSIONS + 1], begin, end)
    if len(shape) > _MAX_DIMENSIONS or not all(type(one) is int and 0 <= one <= _MAX_NUMBER for one in numbers):
        raise InvalidCheckpoint(f"{path.name}: the entry of {name} is malformed: {shown(fields)}")
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        raise InvalidCheckpoint(f"{path.name}: {name} has dtype {shown(dtype_name)}; known are {', '.join(_DTYPES)}")
    dtype = _DTYPES[dtype_name]
    if end - begin != prod(shape) * dtype.itemsize:
        raise InvalidCheckpoint(
            f"{path.name}: {name} is {dtype_name} of shape {list(shape)}, "
            f"which does not fill its {end - begin} bytes at {begin}"
        )
    return _Entry(path, TensorInfo(shape, dtype.name), dtype, data_start + begin), data_start + end
