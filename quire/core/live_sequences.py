"""The sequences that wait or run, and what they hold."""

from collections.abc import Callable, Iterable

from quire.core.counters import Counters
from quire.core.deadlines import Deadline, Deadlines
from quire.core.limits import Limits, SoFar
from quire.core.page_pool import PagePool
from quire.core.plan import Failure
from quire.core.prefix_cache import Match, PrefixCache
from quire.core.queue import Queue
from quire.core.running import Running
from quire.core.sequence import Sequence, State
from quire.core.shared_fills import SharedFills
from quire.errors import DeadlineExceeded
from quire.request import Request

# Given the length of a prompt: pages are shared only where this agrees, since positions are computed alike only there.
PrefixKey = Callable[[int], int]


class LiveSequences:
    """Every sequence from its arrival to its end.

    Each is in the queue or runs, and belongs to a request that has not ended. Every page is free, or held by those that
    run and by the cache. Owned by the scheduler; sequences come, start, stop and end by the methods here.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        counters: Counters,
        prefix_key: PrefixKey | None,
    ) -> None:
        self.counters = counters
        self._limits = limits
        self._clock = clock
        self._prefix_key = prefix_key
        self._num_arrived = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """New accounts: nothing is live, every page and slot is free, nothing is cached."""
        limits = self._limits
        self.requests: dict[int, list[Sequence]] = {}  # by request, those that have not ended
        self.sequences: dict[int, Sequence] = {}
        self.focus: frozenset[int] | None = None  # the only requests that may run
        self._deadlines = Deadlines(self._clock)
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(self.pool, limits.page_size)
        fills = SharedFills(self.cache, limits.page_size)
        self.queue = Queue(fills, limits.max_batch_size, limits.max_queued, self._clock)
        self.running = Running(limits, self.cache)

    def next_waiting(self) -> Sequence | None:
        """Who is to start next."""
        if self.focus is None:
            return self.queue.head()
        return self.queue.head(s for request_id in self.focus for s in self.requests.get(request_id, ()))

    # Coming and going

    def add(self, request: Request, so_far: SoFar, waited_s: float = 0.0) -> None:
        """Queue those samples of a request that have not ended. `waited_s`: the part of its time that has passed."""
        self._deadlines.add(request, waited_s)
        # Without prefix caching only the samples of one request share pages, under a salt of their own.
        key = 0 if self._prefix_key is None else self._prefix_key(len(request.prompt))
        salt = f"{key}+{request.salt}" if self._limits.prefix_caching else f"-{self._num_arrived}"
        sequences = []
        for sample, generated in enumerate(so_far):
            if generated is None:
                continue
            self._num_arrived += 1
            sequence = Sequence(self._num_arrived, request, sample, salt, generated)
            sequences.append(sequence)
            self.sequences[sequence.id] = sequence
            self.queue.push(sequence)
        self.requests[request.request_id] = sequences

    def start(self, sequence: Sequence, pages: list[int], match: Match) -> None:
        """From the queue to a slot, with `pages` of which those of the match are computed."""
        self.queue.leave(sequence)
        self.running.start(sequence, pages, match)
        self.queue.promise(sequence, match.place)

    def publish(self, sequence: Sequence) -> None:
        """A prefill got further: its full pages can be shared, and those that waited for them come back."""
        self.running.publish(sequence)
        self.queue.settle(sequence)
        if sequence.state is State.FILLING and sequence.place is not None:
            self.queue.promise(sequence, sequence.place)

    def take_or_preempt(self, count: int, sequence: Sequence) -> list[int] | None:
        """Pages for a running sequence, at the expense of younger ones; None when it is the youngest itself.

        A decode that gets none returns to the queue; a prefill keeps what it has and waits for the others to end. One
        that runs alone begins again too: it has computed a page that the cache has as well, and will then share it.
        """
        while (pages := self.cache.take(count)) is None:
            youngest = self.running.youngest()
            if youngest is sequence and sequence.state is State.FILLING and len(self.running) > 1:
                return None
            self._preempt(youngest)
            self.counters.preemptions += 1
            if youngest is sequence:
                return None
        return pages

    def restart(self) -> None:
        """All back to the queue: everything on the device is gone."""
        self.cache.clear()
        for sequence in self.running:
            self._preempt(sequence, keep_pages=False)

    def focus_on(self, request_ids: Iterable[int] | None) -> None:
        """Only these requests may run, others return to the queue; None lets all run again."""
        self.focus = None if request_ids is None else frozenset(request_ids)
        for sequence in self.running:
            if not self._in_focus(sequence):
                self._preempt(sequence)

    def abort(self, request_id: int) -> None:
        """End what is left of a request."""
        for sequence in list(self.requests.get(request_id, ())):
            self.end(sequence)

    def expire(self) -> list[Failure]:
        """End the requests whose time has passed."""
        failures: list[Failure] = []
        while (due := self._deadlines.pop_due()) is not None:
            request_id, which = due
            sequences = self.requests[request_id]
            request = sequences[0].request
            if which is Deadline.END:
                error = DeadlineExceeded(f"timeout_s of {request.timeout_s} passed before the answer was complete")
            elif len(sequences) == request.samples and all(s.state is State.WAITING and not s.epoch for s in sequences):
                error = DeadlineExceeded(
                    f"queue_timeout_s of {request.queue_timeout_s} passed before the request could start",
                    self.queue.retry_after_s(),
                )
            else:
                continue
            self.abort(request_id)
            failures.append(Failure(request_id, error))
        return failures

    def end(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.queue.leave(sequence)
        else:
            self.running.stop(sequence, keep_pages=True)
            self.queue.settle(sequence)
        sequence.state = State.ENDED
        sequence.epoch += 1
        del self.sequences[sequence.id]
        live = self.requests[sequence.request_id]
        live.remove(sequence)
        if not live:
            del self.requests[sequence.request_id]
            self._deadlines.forget(sequence.request_id)
            if not self._limits.prefix_caching:
                self.cache.drop(sequence.salt)

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
        self.running.check()
        held = dict.fromkeys(self.cache.pages(), 1)
        for sequence in self.running:
            for page in sequence.pages:
                held[page] = held.get(page, 0) + 1
        for page in range(1, self.pool.num_pages):
            assert held.get(page, 0) == self.pool.holders(page), f"page {page} has holders that nobody knows"
        running = {sequence.id for sequence in self.running}
        assert running <= self.sequences.keys(), "a sequence runs that is not live"
        for sequence in self.sequences.values():
            waits = sequence.state is State.WAITING
            assert waits == (sequence in self.queue) == (sequence.id not in running), f"{sequence.id} is lost"
            assert not waits or not sequence.pages
        assert {s.id for group in self.requests.values() for s in group} == self.sequences.keys()
        self.queue.check(self.sequences.values(), self.running)
        self._deadlines.check(set(self.requests))

    def _preempt(self, sequence: Sequence, keep_pages: bool = True) -> None:
        """Back to the queue, to be computed again from the tokens on the host, or from the cache if they last there."""
        self.running.stop(sequence, keep_pages)
        self.queue.settle(sequence)
        sequence.restart()
        self.queue.push(sequence)

    def _in_focus(self, sequence: Sequence) -> bool:
        return self.focus is None or sequence.request_id in self.focus
