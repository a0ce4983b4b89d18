"""A counter of several processes."""

import mmap
from collections.abc import Iterator
from multiprocessing import reduction
from struct import Struct
from typing import Any

from quire.ipc.shared_memory import locked, new_memory

_NEXT = Struct("<q")


class SharedCounter(Iterator[int]):
    """0, 1, 2 and so on. No two processes that map it get the same number, and a pickle of it is the same counter in
    another process."""

    def __init__(self, file: int | None = None) -> None:
        self._file = new_memory(_NEXT.size) if file is None else file
        self._memory = mmap.mmap(self._file, _NEXT.size)

    def __next__(self) -> int:
        with locked(self._file, 0, _NEXT.size):
            number: int = _NEXT.unpack_from(self._memory)[0]
            _NEXT.pack_into(self._memory, 0, number + 1)
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._file),)


def _attach(duplicate: Any) -> SharedCounter:
    return SharedCounter(duplicate.detach())
