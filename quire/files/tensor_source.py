"""Sources of weights: named tensors, read one at a time."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from quire.errors import InvalidCheckpoint

Array = np.ndarray[Any, Any]

BLOCK_SIZE = 32
# Numbers that lie together along the last axis of a tensor: each is its code, within [-127, 127], times the scale.
BLOCK = np.dtype([("scale", "<f2"), ("codes", "i1", BLOCK_SIZE)])


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # as numpy and ml_dtypes spell it: "float32", "bfloat16", …


class TensorSource(Protocol):
    """The tensors of one checkpoint, under their Hugging Face names and in Hugging Face layouts.

    Opening one reads headers only. `read` gives one tensor and keeps nothing of it, so that the memory in use is the
    caller's. What is read may be a view of a read-only mapped file.
    """

    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Array: ...


def refuse_overlaps(file: str, places: Iterable[tuple[int, int, str]]) -> None:
    """Refuse tensors, each with its begin, end and name, that share bytes: a small file could fill any memory."""
    last_end, last_name = 0, ""
    for begin, end, name in sorted(places):
        if begin < last_end and begin < end:
            raise InvalidCheckpoint(f"{file}: tensors {last_name} and {name} overlap, at byte {begin}")
        if end > last_end:
            last_end, last_name = end, name


def file_identities(paths: Iterable[Path]) -> list[str]:
    """The place, size and time of change of each file: other content has other ones."""
    found = [(path.resolve(), path.stat()) for path in paths]
    return [f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ino}" for path, status in found]


@runtime_checkable
class BlockSource(TensorSource, Protocol):
    """A checkpoint that holds eight-bit numbers, or can give some of its tensors as such without rounding."""

    def read_blocks(self, name: str) -> Array | None:
        """BLOCK [..., blocks], which stand for exactly what `read` gives; None where there are none that do."""
        ...
