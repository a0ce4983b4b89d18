"""A heap that members can leave from the middle."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Distinct members by key, smallest first. Leaving marks an entry; marked ones go when they surface or prevail."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._entry_of: dict[T, int] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[T]:
        """Iterate in no particular order."""
        return iter(self._entry_of)

    def __contains__(self, member: T) -> bool:
        return member in self._entry_of

    def push(self, key: Any, member: T) -> None:
        if member in self._entry_of:
            raise ValueError(f"{member} is in the heap already")
        self._num_pushed += 1
        self._entry_of[member] = self._num_pushed
        heappush(self._heap, (key, self._num_pushed, member))

    def peek(self) -> tuple[Any, T] | None:
        """The smallest key and its member; None when empty."""
        heap = self._heap
        while heap:
            key, entry, member = heap[0]
            if self._entry_of.get(member) == entry:
                return key, member
            heappop(heap)
        return None

    def discard(self, member: T) -> None:
        if self._entry_of.pop(member, None) is not None and len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = [item for item in self._heap if self._entry_of.get(item[2]) == item[1]]
            heapify(self._heap)
