"""Queue times and prefill work of requests."""

from quire.core.plan import Chunk
from quire.core.stats import Blocker
from quire.engine.observer import Observer, Step
from quire.ipc.messages import Account, Started


class OpenAccount:
    """The account of one live request with `timings`."""

    def __init__(self) -> None:
        self.blocked_s: dict[str, float] = {}
        self.num_chunks = 0
        self.num_tokens = 0
        self._epochs: dict[int, int] = {}  # by sample
        self._num_restarts = 0

    def add(self, chunk: Chunk) -> None:
        """Count a chunk of its prompt, or of what it computes again after a preemption."""
        self.num_chunks += 1
        self.num_tokens += chunk.length
        self._num_restarts += chunk.epoch != self._epochs.get(chunk.sample, chunk.epoch)
        self._epochs[chunk.sample] = chunk.epoch

    def read(self, request_id: int) -> Account:
        return Account(
            request_id,
            blocked_s=self.blocked_s,
            prefill_chunks=self.num_chunks,
            prefill_tokens=self.num_tokens,
            preemptions=self._num_restarts,
        )


class QueueTimes(Observer):
    """Measures how long each request waits for its first slot; keeps an account of each request with `timings`.

    The queue is strict: what keeps its head waiting keeps all requests waiting, so that time counts for each of them.
    Owned by the engine thread.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, float] = {}  # requests without a slot so far, and the time of their arrival
        self._started: list[Started] = []  # not reported yet
        self._open: dict[int, OpenAccount] = {}
        self._changed: set[int] = set()
        self._blocked_by: Blocker | None = None
        self._since_s = 0.0

    def add(self, request_id: int, arrived_s: float, now: float, timings: bool) -> None:
        """A request was queued."""
        self._settle(now, self._blocked_by)
        self._waiting[request_id] = arrived_s
        if timings:
            self._open[request_id] = OpenAccount()

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._waiting.pop(request_id, None)
        self._open.pop(request_id, None)
        self._changed.discard(request_id)

    def step_launched(self, step: Step) -> None:
        self._settle(step.launched_s, step.blocked_by)
        plan = step.plan
        if plan.started and self._waiting:
            slots = {start.slot for start in plan.started}
            for chunk in plan.prefills:
                if chunk.slot in slots and chunk.request_id in self._waiting:
                    queue_s = max(0.0, step.launched_s - self._waiting.pop(chunk.request_id))
                    self._started.append(Started(chunk.request_id, queue_s))
        if self._open:
            for chunk in plan.prefills:
                if chunk.request_id in self._open:
                    self._open[chunk.request_id].add(chunk)
                    self._changed.add(chunk.request_id)

    def started(self) -> list[Started]:
        """The requests that got a slot since the last call."""
        started, self._started = self._started, []
        return started

    def accounts(self) -> list[Account]:
        """The accounts that have changed since the last call."""
        changed, self._changed = self._changed, set()
        return [self._open[request_id].read(request_id) for request_id in changed]

    def _settle(self, now: float, blocked_by: Blocker | None) -> None:
        """Count the time since the last plan for what that plan left the queue waiting for."""
        if self._blocked_by is not None and self._open:
            name = self._blocked_by.client_name
            for request_id in self._open.keys() & self._waiting.keys():
                blocked_s = self._open[request_id].blocked_s
                blocked_s[name] = blocked_s.get(name, 0.0) + now - self._since_s
        self._blocked_by, self._since_s = blocked_by, now
