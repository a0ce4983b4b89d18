"""The header of a GGUF file: its metadata, and where each tensor lies.

Read here and not with `gguf.GGUFReader`, which makes an object of every array element: 4 s for a vocabulary of 49,152
tokens, against 0.1 s.
"""

import mmap
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from quire.errors import InvalidCheckpoint, UnsupportedModel, listed, shown
from quire.files.regular_file import open_regular
from quire.files.tensor_source import refuse_overlaps

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_NESTING = 4  # arrays of arrays; real files have none
_MAX_ITEMS = 1 << 22  # of all arrays together; vocabularies have 300,000, each with some numbers
_MAX_HEADER_BYTES = 64 << 20  # without its data; those of the largest vocabularies have 16 MiB
_MAX_PAIRS = 1 << 16  # of metadata
_MAX_TENSORS = 1 << 18
_MAX_STRING_BYTES = 64 << 20

_BOOL, _STRING, _ARRAY = 7, 8, 9
# As `struct` spells them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
# Numbers in a block, and bytes of it, of the types that can be read. Asking the library takes a tenth of a second.
_BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    8: ("Q8_0", 32, 34),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    39: ("MXFP4", 32, 17),
}
_PART_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

T = TypeVar("T")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as the file holds it. `shape` is row-major: the file's own order reversed."""

    path: Path
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int

    def matrices(self) -> list["GGUFTensor"]:
        """The parts along the first axis: blocks lie along the last, so that none is cut."""
        count, *shape = self.shape
        size = self.num_bytes // count
        return [
            replace(self, shape=tuple(shape), offset=self.offset + index * size, num_bytes=size)
            for index in range(count)
        ]


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a file, or of all parts of a split model: `path` and `metadata` are then those of the first."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise InvalidCheckpoint(f"{self.path}: metadata has no general.architecture")
        return name


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The file's key-value pairs as Python values. The tensor table and the data are not looked at."""
    return _with_cursor(Path(path), lambda cursor: _read_pairs(cursor)[0])


def read_header(path: str | Path) -> GGUFHeader:
    """Metadata and tensor table, checked: every tensor lies inside its file, and every part is there."""
    header = _with_cursor(Path(path), _read_header)
    count = header.metadata.get("split.count", 1)
    return _join_parts(header.path, count) if isinstance(count, int) and count > 1 else header


def _join_parts(path: Path, count: int) -> GGUFHeader:
    """The whole of which `path` is a part: tools that split files number them in their names."""
    numbered = _PART_NAME.fullmatch(path.name)
    if numbered is None or int(numbered["count"]) != count:
        raise InvalidCheckpoint(f"{path}: one of {count} parts, but not named so (NAME-00001-of-{count:05}.gguf)")
    paths = [path.with_name(f"{numbered['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise InvalidCheckpoint(f"{path}: one of {count} parts, of which are missing: {listed(missing)}")
    headers = [_with_cursor(part, _read_header) for part in paths]
    tensors: dict[str, GGUFTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise InvalidCheckpoint(f"tensor {name} is in both {tensors[name].path} and {tensor.path}")
            tensors[name] = tensor
    expected = headers[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise InvalidCheckpoint(f"{paths[0]}: {expected} tensors in all its parts, which hold {len(tensors)}")
    return GGUFHeader(paths[0], headers[0].metadata, tensors)


class _Cursor:
    """A position in a mapped file. Never moves past its end: a short file is reported, not read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.num_items = 0  # of arrays

    def skip(self, num_bytes: int) -> int:
        start = self.at
        if num_bytes > self.size - start:
            raise InvalidCheckpoint(
                f"{self.path}: truncated: the header needs {num_bytes} bytes at {start}, the file has {self.size}"
            )
        if num_bytes > _MAX_HEADER_BYTES - start:
            raise InvalidCheckpoint(
                f"{self.path}: the header needs {num_bytes} bytes at {start}; at most {_MAX_HEADER_BYTES} are read"
            )
        self.at = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8))[0])

    def string(self) -> str:
        length = self.u64()
        if length > _MAX_STRING_BYTES:
            raise InvalidCheckpoint(
                f"{self.path}: a string of {length} bytes at {self.at}; {_MAX_STRING_BYTES} are read"
            )
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise InvalidCheckpoint(f"{self.path}: the string at byte {start} is not UTF-8: {error}") from error

    def strings(self, count: int) -> list[str]:
        """`string()` many times: written out, because vocabularies have hundreds of thousands of them."""
        data, at, size = self.data, self.at, min(self.size, _MAX_HEADER_BYTES)
        unpack = _U64.unpack_from
        found = []
        try:
            for _ in range(count):
                (length,) = unpack(data, at)
                start = at + 8
                at = start + length
                if at > size:
                    break
                found.append(data[start:at].decode())
        except struct.error:
            at = self.size + 1
        except UnicodeDecodeError as error:
            raise InvalidCheckpoint(f"{self.path}: the string at byte {start} is not UTF-8: {error}") from error
        if at > self.size:
            raise InvalidCheckpoint(
                f"{self.path}: truncated: string {len(found)} of an array of {count} passes the end at {self.size}"
            )
        if at > size:
            raise InvalidCheckpoint(
                f"{self.path}: the header goes on at {size}; at most {_MAX_HEADER_BYTES} bytes are read"
            )
        self.at = at
        return found

    def numbers(self, kind: str, count: int) -> list[Any]:
        layout = f"<{count}{kind}"
        return list(struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout))))

    def value(self, type_: int, nesting: int = 0) -> Any:
        if type_ == _STRING:
            return self.string()
        if type_ == _ARRAY:
            if nesting == _MAX_NESTING:
                raise InvalidCheckpoint(f"{self.path}: arrays are nested more than {_MAX_NESTING} deep at {self.at}")
            item_type = self.u32()
            count = self.u64()
            self.num_items += count
            if self.num_items > _MAX_ITEMS:
                raise InvalidCheckpoint(
                    f"{self.path}: {self.num_items} items of arrays, with those of the array at {self.at}; "
                    f"{_MAX_ITEMS} are read"
                )
            if item_type == _STRING:
                return self.strings(count)
            if item_type == _ARRAY:
                return [self.value(_ARRAY, nesting + 1) for _ in range(count)]
            return self.numbers(self.number_type(item_type), count)
        return self.numbers(self.number_type(type_), 1)[0]

    def number_type(self, type_: int) -> str:
        if type_ not in _NUMBERS:
            raise InvalidCheckpoint(f"{self.path}: GGUF has no metadata type {type_}, found at byte {self.at}")
        return _NUMBERS[type_]


def _with_cursor(path: Path, read: Callable[[_Cursor], T]) -> T:
    try:
        file = open_regular(path)
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{path}: no such file") from error
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        if not os.fstat(file.fileno()).st_size:
            raise InvalidCheckpoint(f"{path}: the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(_Cursor(path, data))


def _read_pairs(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """The metadata, and the number of tensors in the table that follows."""
    start = cursor.skip(4)
    magic = cursor.data[start : start + 4]
    if magic != _MAGIC:
        raise InvalidCheckpoint(f"{cursor.path}: not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
    version = cursor.u32()
    if version not in _VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "big-endian GGUF" if big_endian else f"GGUF version {version}"
        raise UnsupportedModel(f"{cursor.path}: {what} is not read; little-endian versions {_VERSIONS} are")
    num_tensors = cursor.u64()
    num_pairs = cursor.u64()
    if num_pairs > _MAX_PAIRS:
        raise InvalidCheckpoint(f"{cursor.path}: {num_pairs} pairs of metadata; at most {_MAX_PAIRS} are read")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise InvalidCheckpoint(f"{cursor.path}: metadata key {key} occurs twice")
        metadata[key] = cursor.value(cursor.u32())
    return metadata, num_tensors


def _read_header(cursor: _Cursor) -> GGUFHeader:
    metadata, num_tensors = _read_pairs(cursor)
    if num_tensors > _MAX_TENSORS:
        raise InvalidCheckpoint(f"{cursor.path}: {num_tensors} tensors; at most {_MAX_TENSORS} are read")
    rows = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dimensions = cursor.u32()
        if num_dimensions > _MAX_DIMENSIONS:
            raise InvalidCheckpoint(
                f"{cursor.path}: tensor {name} has {num_dimensions} dimensions; GGUF allows {_MAX_DIMENSIONS}"
            )
        shape = tuple(reversed([cursor.u64() for _ in range(num_dimensions)]))
        rows.append((name, shape, cursor.u32(), cursor.u64()))

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise InvalidCheckpoint(f"{cursor.path}: general.alignment is {shown(alignment)}, not a positive integer")
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    outside = []
    for name, shape, type_, offset in rows:
        if name in tensors:
            raise InvalidCheckpoint(f"{cursor.path}: tensor {name} occurs twice")
        tensor = _tensor(cursor.path, name, shape, type_, data_start + offset)
        tensors[name] = tensor
        if tensor.offset + tensor.num_bytes > cursor.size:
            outside.append(name)
    if outside:
        raise InvalidCheckpoint(
            f"{cursor.path}: truncated: {len(outside)} tensors pass the end at {cursor.size}: {listed(outside)}"
        )
    refuse_overlaps(str(cursor.path), [(one.offset, one.offset + one.num_bytes, one.name) for one in tensors.values()])
    return GGUFHeader(cursor.path, metadata, tensors)


def _tensor(path: Path, name: str, shape: tuple[int, ...], type_: int, offset: int) -> GGUFTensor:
    kind, block_size, block_bytes = _BLOCKS.get(type_) or _other_block(path, name, type_)
    if prod(shape) == 0:
        raise InvalidCheckpoint(f"{path}: tensor {name} of shape {list(shape)} is empty")
    width = shape[-1] if shape else 1
    if width % block_size:
        raise InvalidCheckpoint(
            f"{path}: tensor {name} has rows of {width}, which {kind} blocks of {block_size} cannot fill"
        )
    return GGUFTensor(path, name, kind, shape, offset, prod(shape) // block_size * block_bytes)


def _other_block(path: Path, name: str, type_: int) -> tuple[str, int, int]:
    """Block size of a type that is refused later, by name."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(type_)
    except ValueError as error:
        raise UnsupportedModel(f"{path}: tensor {name} has the unknown type {type_}") from error
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return kind.name, block_size, block_bytes
