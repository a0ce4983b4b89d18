"""The requests that have not ended."""

from collections.abc import Callable, Iterator

from quire.core.deadlines import Deadline, Deadlines
from quire.core.limits import Limits, SoFar
from quire.core.plan import Failure
from quire.core.prefix_tree import digest_of_salt, encoded
from quire.core.queue import Queue
from quire.core.running import Running
from quire.core.sequence import Sequence, State
from quire.core.speculation import Speculation
from quire.errors import DeadlineExceeded, queue_limit, time_limit
from quire.request import Request

# Given the length of a prompt: pages are shared only where this agrees, since positions are computed alike only there.
PrefixKey = Callable[[int], int]
LONG_SALT = 512  # characters; the cache keeps a salt for as long as a page, and of a longer one its digest


class Requests:
    """Every request from its arrival to its end.

    Each sequence of a request that has not ended waits in the queue or runs. Owned by the scheduler.
    """

    def __init__(
        self,
        limits: Limits,
        queue: Queue,
        running: Running,
        clock: Callable[[], float],
        prefix_key: PrefixKey | None,
        speculation: Speculation,
        switch_length: int | None,
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._running = running
        self._prefix_key = prefix_key
        self._speculation = speculation
        self._switch_length = switch_length
        self._deadlines = Deadlines(clock)
        self._live: dict[int, list[Sequence]] = {}  # by request, its sequences that have not ended
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[int]:
        return iter(self._live)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._live

    def sequences(self, request_id: int) -> list[Sequence]:
        return self._live.get(request_id, [])

    def add(self, request: Request, so_far: SoFar, waited_s: float = 0.0) -> None:
        """Queue the samples of a request that have not ended. `waited_s`: the part of its time that has passed."""
        adapter, salt = self._adapter_of(request), self.salt_of(request)
        self._deadlines.add(request, waited_s)
        sequences = self._live[request.request_id] = []
        reuses = self._limits.snapshots != 0
        for sample, generated in enumerate(so_far):
            if generated is not None:
                self._num_arrived += 1
                how = adapter, reuses, self._limits.replays
                sequence = Sequence(self._num_arrived, request, sample, salt, generated, *how)
                self._note_switch(sequence)
                sequences.append(sequence)
                self._running.adapters.hold(adapter)
                self._speculation.begin(sequence)
                self._queue.arrive(sequence, self._num_uncached(sequence, sequences[0]))

    def _note_switch(self, sequence: Sequence) -> None:
        """Note the position from which the sequence is computed anew, if it can outgrow the switch length of the model.
        One that another engine began may be beyond it already."""
        length = self._switch_length
        if length is None or not sequence.num_prompt <= length < sequence.limit - 1:
            return
        sequence.switch_end = length
        sequence.switch_salt = self._salt(sequence.request, str(sequence.adapter or ""), length + 1)
        sequence.switch_if_due()

    def _num_uncached(self, sequence: Sequence, first: Sequence) -> int:
        """The tokens that it must compute. A short prompt is short, cached or not. `first`: of the samples, which is
        searched for in the cache for all that are alike."""
        if len(sequence.tokens) <= self._limits.short_prompt:
            return len(sequence.tokens)
        if sequence is not first and first.match is not None and sequence.tokens == first.tokens:
            sequence.match = first.match._replace(path=[*first.match.path])
            sequence.digests = [*first.digests]
        return len(sequence.tokens) - self._running.match(sequence).num_tokens(self._limits.page_size)

    def salt_of(self, request: Request) -> str:
        """The salt of the pages of a request, which knows its adapter too."""
        adapter = self._adapter_of(request)
        return self.salt_with(request, str(adapter) if adapter else "")

    def _adapter_of(self, request: Request) -> int:
        return self._running.adapters.find(request.adapter, request.adapter_digest)

    def salt_with(self, request: Request, adapter: str) -> str:
        """The salt with this name of its adapter; "" without one."""
        return self._salt(request, adapter, len(request.prompt))

    def _salt(self, request: Request, adapter: str, length: int) -> str:
        key = 0 if self._prefix_key is None else self._prefix_key(length)
        # Without prefix caching only the samples of one request share pages, under a salt of their own.
        salt = f"{key}+{request.salt}" if self._limits.prefix_caching else f"-{request.request_id}+{key}"
        salt = f"{adapter}@{salt}" if adapter else salt  # its keys and values are its own
        return salt if len(salt) <= LONG_SALT else f"#{digest_of_salt(encoded(salt)).hex()}"

    def end(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self._queue.leave(sequence)
            self._running.adapters.leave(sequence)
        else:
            self._running.stop(sequence)
        sequence.state = State.ENDED
        self._running.adapters.release(sequence.adapter)
        sequence.epoch += 1
        live = self._live[sequence.request_id]
        live.remove(sequence)
        if not live:
            del self._live[sequence.request_id]
            self._deadlines.forget(sequence.request_id)
            if not self._limits.prefix_caching:
                self._running.cache.drop(sequence.salt)
                self._running.cache.drop(sequence.switch_salt)

    def abort(self, request_id: int) -> None:
        """End what is left of a request."""
        for sequence in list(self._live.get(request_id, ())):
            self.end(sequence)

    def expire(self) -> list[Failure]:
        """End the requests past their deadline."""
        failures: list[Failure] = []
        while (due := self._deadlines.pop_due()) is not None:
            request_id, which = due
            sequences = self._live[request_id]
            request = sequences[0].request
            if which is Deadline.END:
                error = DeadlineExceeded(f"{time_limit(request.timeout_s)} passed before the answer was complete")
            elif len(sequences) == request.samples and all(s.state is State.WAITING and not s.epoch for s in sequences):
                error = DeadlineExceeded(
                    f"{queue_limit(request.queue_timeout_s)} passed before the request could start",
                    self._queue.retry_after_s(),
                )
            else:
                continue
            self.abort(request_id)
            failures.append(Failure(request_id, error))
        return failures

    def check(self) -> None:
        sequences = {sequence.id: sequence for live in self._live.values() for sequence in live}
        running = {sequence.id for sequence in self._running}
        assert all(self._live.values()), "a request without sequences is live"
        assert running <= sequences.keys(), "a sequence runs that is not live"
        for sequence in sequences.values():
            waits = sequence.state is State.WAITING
            assert waits == (sequence in self._queue) == (sequence.id not in running), f"{sequence.id} is lost"
            assert not waits or not sequence.tables
        self._queue.check(sequences.values(), self._running)
        self._deadlines.check(set(self._live))
