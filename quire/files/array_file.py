"""A file of arrays that can be memory-mapped.

A header of JSON has the dtype, the shape and the place of each array, and a sum of its bytes. Arrays begin at multiples
of ALIGNMENT, so that a mapped one can be used where it lies.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quire.files.regular_file import open_regular

Array = np.ndarray[Any, Any]

MAGIC = b"QUIREARRAYS\x00"
LENGTH_BYTES, DIGEST_BYTES = 4, 32
ALIGNMENT = 64


class DamagedFile(Exception):
    """The file is not what was written."""


def write_arrays(path: Path, arrays: Sequence[Array]) -> None:
    """Write a file and flush it to disk, so that a file that exists after a power failure is complete."""
    entries, offset = [], 0
    for array in arrays:
        entries.append([array.dtype.name, list(array.shape), offset, _sum_of(array)])
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(LENGTH_BYTES, "little") + hashlib.sha256(header).digest() + header)
        for array in arrays:
            _pad(file)
            file.write(_bytes_of(array).data)
        _pad(file)
        file.flush()
        os.fsync(file.fileno())


def read_arrays(path: Path) -> list[Array]:
    """Read-only views of the file. Raises DamagedFile, or OSError.

    Each array's sum is compared, which takes as long as reading it from memory once.
    """
    with open_regular(path) as file:
        start = file.read(len(MAGIC) + LENGTH_BYTES + DIGEST_BYTES)
        length = int.from_bytes(start[len(MAGIC) : len(MAGIC) + LENGTH_BYTES], "little")
        header = file.read(length)
        if not start.startswith(MAGIC) or hashlib.sha256(header).digest() != start[-DIGEST_BYTES:]:
            raise DamagedFile(f"{path}: the header is damaged")
        data_start = -(-file.tell() // ALIGNMENT) * ALIGNMENT
        size = os.fstat(file.fileno()).st_size
        entries = json.loads(header)
        arrays = []
        mapped = np.memmap(file, np.uint8, "r")
    for number, (name, shape, offset, expected) in enumerate(entries):
        dtype = np.dtype(name)
        begin, end = data_start + offset, data_start + offset + prod(shape) * dtype.itemsize
        if end > size:
            raise DamagedFile(f"{path}: array {number} ends at byte {end}, the file has {size}")
        array = mapped[begin:end].view(dtype).reshape(shape).view(np.ndarray)
        if _sum_of(array) != expected:
            raise DamagedFile(f"{path}: array {number} was changed")
        arrays.append(array)
    return arrays


def _sum_of(array: Array) -> int:
    """A checksum of the bytes as 64-bit numbers. Each eighth of the array has its own weight."""
    data = _bytes_of(array)
    whole = len(data) // 8 * 8
    total = int.from_bytes(data[whole:].tobytes(), "little")
    for place, part in enumerate(np.array_split(data[:whole].view(np.uint64), 8)):
        total += (place + 1) * int(part.sum(dtype=np.uint64))
    return total % 2**64


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _pad(file: Any) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
