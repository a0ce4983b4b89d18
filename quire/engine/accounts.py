"""What became of the requests that want to know."""

import time
from collections.abc import Callable, Iterable

from quire.core.plan import Chunk, Kind, StepPlan
from quire.ipc.messages import Account

# What the scheduler calls the things that keep a queue waiting, by what they are to a client.
BLOCKERS = {
    "max_batch_size": "slots",
    "pages": "pages",
    "max_batch_prefill_tokens": "budget",
    "max_batch_total_tokens": "budget",
    "waiting_served_ratio": "waiting_rule",
    "shared_prefix": "shared_prefix",
}


class OpenAccount:
    """One request's, while it is in the engine."""

    def __init__(self, now: float) -> None:
        self.submitted_s = now
        self.started_s: float | None = None
        self.blocked_s: dict[str, float] = {}
        self.num_chunks = 0
        self.num_tokens = 0
        self._epochs: dict[int, int] = {}  # by sample
        self._num_restarts = 0

    def add(self, chunk: Chunk) -> None:
        """Another part of its prompt, or of what it computes again."""
        self.num_chunks += 1
        self.num_tokens += chunk.length
        self._num_restarts += chunk.epoch != self._epochs.get(chunk.sample, chunk.epoch)
        self._epochs[chunk.sample] = chunk.epoch

    def read(self, request_id: int, now: float) -> Account:
        return Account(
            request_id,
            queue_s=(now if self.started_s is None else self.started_s) - self.submitted_s,
            blocked_s=self.blocked_s,
            prefill_chunks=self.num_chunks,
            prefill_tokens=self.num_tokens,
            preemptions=self._num_restarts,
        )


class Accounts:
    """Keeps an account for each request that was opened, from the plans there are. Without any it costs nothing.

    The queue is strict: what keeps its head waiting keeps everyone waiting, so that time is put down to all who wait.
    Owned by the engine thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, OpenAccount] = {}
        self._waiting: set[int] = set()
        self._changed: set[int] = set()
        self._blocked_by: str | None = None
        self._since_s = 0.0

    def open(self, request_id: int, blocked_by: str | None) -> None:
        """A request was queued. `blocked_by`: what kept the queue waiting when a step was last planned."""
        now = self._clock()
        self._settle(now, blocked_by)
        self._open[request_id] = OpenAccount(now)
        self._waiting.add(request_id)

    def planned(self, plan: StepPlan, blocked_by: str | None) -> None:
        """A step was planned, and what it left in the queue is `blocked_by` something."""
        if not self._open:
            return
        if self._waiting:
            now = self._clock()
            self._settle(now, blocked_by)
            self._begin(plan, now)
        for chunk in reversed(plan.chunks):  # decodes come first
            if chunk.kind is Kind.DECODE:
                break
            if chunk.request_id in self._open:
                self._open[chunk.request_id].add(chunk)
                self._changed.add(chunk.request_id)

    def news(self) -> Iterable[Account]:
        """The accounts that have changed since this was last asked."""
        if not self._changed:
            return ()
        changed, self._changed = self._changed, set()
        now = self._clock()
        return [self._open[request_id].read(request_id, now) for request_id in changed]

    def close(self, request_id: int) -> None:
        """The request is over."""
        if self._open.pop(request_id, None) is not None:
            self._waiting.discard(request_id)
            self._changed.discard(request_id)

    def _begin(self, plan: StepPlan, now: float) -> None:
        for chunk in plan.chunks[-len(plan.started) :] if plan.started else ():  # those that start come last
            if chunk.request_id in self._waiting:
                self._open[chunk.request_id].started_s = now
                self._waiting.discard(chunk.request_id)

    def _settle(self, now: float, blocked_by: str | None) -> None:
        """Put the time since the last plan down to what that left the queue waiting for."""
        if self._blocked_by is not None:
            name = BLOCKERS[self._blocked_by]
            for request_id in self._waiting:
                blocked_s = self._open[request_id].blocked_s
                blocked_s[name] = blocked_s.get(name, 0.0) + now - self._since_s
        self._blocked_by, self._since_s = blocked_by, now
