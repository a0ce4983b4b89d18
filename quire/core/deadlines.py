"""The deadlines of requests."""

from collections.abc import Callable
from enum import Enum, auto

from quire.core.lazy_heap import LazyHeap
from quire.request import Request


class Deadline(Enum):
    START = auto()  # it must have started by then
    END = auto()


class Deadlines:
    """The deadlines of the live requests, each until it has passed. Owned by the scheduler."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: LazyHeap[tuple[int, Deadline]] = LazyHeap()

    def add(self, request: Request, waited_s: float = 0.0) -> None:
        """The time of `request` began `waited_s` ago."""
        start_s = self._clock() - waited_s
        if request.queue_timeout_s is not None:
            self._heap.push(start_s + request.queue_timeout_s, (request.request_id, Deadline.START))
        if request.timeout_s is not None:
            self._heap.push(start_s + request.timeout_s, (request.request_id, Deadline.END))

    def forget(self, request_id: int) -> None:
        self._heap.discard((request_id, Deadline.START))
        self._heap.discard((request_id, Deadline.END))

    @property
    def next_s(self) -> float | None:
        """The moment at which the first passes; None when there is none."""
        first = self._heap.peek()
        return None if first is None else first[0]

    def pop_due(self) -> tuple[int, Deadline] | None:
        """The first that has passed and was not handed out yet; None when there is none."""
        first = self._heap.peek()
        if first is None or first[0] > self._clock():
            return None
        self._heap.discard(first[1])
        return first[1]

    def check(self, request_ids: set[int]) -> None:
        assert {request_id for request_id, _ in self._heap} <= request_ids, "a deadline outlived its request"
