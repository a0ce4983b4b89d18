"""The sequences that wait."""

from collections.abc import Callable, Iterable

from quire.core.lazy_heap import LazyHeap
from quire.core.prefix_cache import Place
from quire.core.sequence import Sequence
from quire.core.shared_fills import SharedFills
from quire.errors import Overloaded
from quire.request import Request
from quire.retry_reservations import MAX_WAIT_S, MIN_WAIT_S, RetryReservations


class Queue:
    """Who is next, and how long the wait is.

    A sequence that waits stands in line by age, or is parked until another has computed a page it needs. No more are
    parked than could run together: the next one that would be stays at the head of the line and holds it up, so that
    a step never looks at more of a long line than that. Owned by the scheduler.
    """

    def __init__(self, fills: SharedFills, max_parked: int, max_queued: int | None, clock: Callable[[], float]) -> None:
        self._fills = fills
        self._max_parked = max_parked
        self._max_queued = max_queued
        self._reservations = RetryReservations((max_queued or 0) // 2, clock)
        self._clock = clock
        self._line: LazyHeap[Sequence] = LazyHeap()
        self._last_admission_s: float | None = None
        self._admission_interval_s = 0.0  # measured while others wait

    def __len__(self) -> int:
        return len(self._line) + len(self._fills)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._line or sequence in self._fills

    def head(self, among: Iterable[Sequence] | None = None) -> Sequence | None:
        """Who is first in line, of these sequences or of all."""
        if among is not None:
            return min((one for one in among if one in self._line), key=lambda one: one.age, default=None)
        first = self._line.peek()
        return None if first is None else first[1]

    def refuse_if_full(self, request: Request) -> None:
        """Whoever is refused has a place when it comes back as it is told."""
        most = self._max_queued
        if most is None or (len(self) + request.samples <= most and not self._reservations):
            return
        client = hash((request.prompt, request.max_tokens, request.salt))
        num_kept = self._reservations.num_kept_from(client) if len(self) else 0
        if len(self) + num_kept + request.samples <= most:
            self._reservations.admitted(client)
            return
        retry_after_s = self._reservations.refused(
            client, request.samples, self.retry_after_s(), self._admission_interval_s
        )
        kept = f" and {num_kept} places are kept for those who come back" if num_kept else ""
        raise Overloaded(f"{len(self)} sequences wait{kept}, the queue takes {most}", retry_after_s)

    def push(self, sequence: Sequence) -> None:
        self._line.push(sequence.age, sequence)

    def leave(self, sequence: Sequence) -> None:
        """`sequence` waits no more."""
        self._line.discard(sequence)
        self._fills.leave(sequence)

    def must_park(self, sequence: Sequence, place: Place) -> bool:
        """Whether another computes the page that `sequence`, found in the cache up to `place`, needs next."""
        return self._fills.is_promised(sequence, place)

    def park(self, sequence: Sequence, place: Place) -> bool:
        """Out of the line until that page is there. False when as many are parked as may be."""
        if len(self._fills) >= self._max_parked:
            return False
        self._line.discard(sequence)
        self._fills.park(sequence, place)
        return True

    def promise(self, sequence: Sequence, place: Place) -> None:
        """`sequence`, which runs, computes the page after `place`: others that need it wait."""
        self._fills.promise(sequence, place)

    def settle(self, sequence: Sequence) -> None:
        """What `sequence` promised is there, or will not be: those that waited for it are back in line."""
        for waited in self._fills.settle(sequence):
            self.push(waited)

    def note_admissions(self, count: int) -> None:
        """Keep the time an admission takes, averaged over the last few, for those that must be told when to retry."""
        now = self._clock()
        if self._last_admission_s is not None:
            interval = (now - self._last_admission_s) / count
            self._admission_interval_s += 0.2 * (interval - self._admission_interval_s)
        self._last_admission_s = now if len(self) else None

    def retry_after_s(self) -> float:
        """How long the queue, as it is now, takes to empty at the measured rate."""
        return min(max(MIN_WAIT_S, self._admission_interval_s * len(self)), MAX_WAIT_S)

    def check(self, sequences: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        waiting = 0
        for sequence in sequences:
            assert not (sequence in self._line and sequence in self._fills), f"sequence {sequence.id} waits twice"
            waiting += sequence in self
        assert waiting == len(self), "a sequence waits that is not live"
        assert len(self._fills) <= self._max_parked
        self._fills.check(running)
        self._reservations.check()
