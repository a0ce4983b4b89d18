"""A record that outlives the engine process, for the process that replaces it."""

import mmap
import threading
import zlib
from multiprocessing import reduction
from struct import Struct
from typing import Any

import msgspec

from quire.ipc.shared_memory import new_memory

NUM_BYTES = 2**20
_HEADER = Struct("<II")  # length and checksum of the record


class Search(msgspec.Struct, frozen=True, array_like=True):
    """Progress of the search for a request that makes steps fail, by request ids. Another process can continue it."""

    groups: list[list[int]] = []
    accused: int | None = None
    doubtful: int | None = None
    num_probe_faults: int = 0
    num_unexplained: int = 0


class Record(msgspec.Struct, frozen=True, array_like=True):
    running: list[int] = []  # the requests that had a slot
    search: Search | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Journal:
    """One record in memory that the supervisor holds as well, so that it outlives the process that writes it.

    A write takes microseconds, so it can precede every launch that changes the set of running requests. A pickle of it
    is the same memory in another process.
    """

    def __init__(self, file: int | None = None) -> None:
        if file is None:
            file = new_memory(NUM_BYTES)
        self._file = file
        self._writing = threading.Lock()
        self._is_closed = False
        self._memory = mmap.mmap(file, NUM_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._file),)

    def write(self, record: Record, *, is_last: bool = False) -> None:
        """Write a record. After one with `is_last`, later writes of this process are ignored."""
        data = _encode(record)
        end = _HEADER.size + len(data)
        with self._writing:
            if end <= NUM_BYTES and not self._is_closed:
                self._memory[_HEADER.size : end] = data
                self._memory[: _HEADER.size] = _HEADER.pack(len(data), zlib.crc32(data))
            self._is_closed = self._is_closed or is_last

    def read(self) -> Record:
        """The last record; an empty one if there is none, or if a write was cut short."""
        length, checksum = _HEADER.unpack(self._memory[: _HEADER.size])
        data = self._memory[_HEADER.size : _HEADER.size + length]
        if not length or zlib.crc32(data) != checksum:
            return Record()
        try:
            return _decode(data)
        except msgspec.MsgspecError:  # of another version
            return Record()


def _attach(duplicate: Any) -> Journal:
    return Journal(duplicate.detach())
