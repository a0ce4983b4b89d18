"""Decides which tokens each step computes."""

from collections import deque
from collections.abc import Callable, Iterable

from quire.core.adapter_slots import AdapterSlots
from quire.core.completion import StepCompletion, StepInFlight
from quire.core.limits import Limits, SoFar, refuse_impossible_resume
from quire.core.plan import Failure, StepPlan, StepResult, Update
from quire.core.planner import Planner
from quire.core.prefix_exchange import PrefixExchange
from quire.core.queue import Queue
from quire.core.requests import PrefixKey, Requests
from quire.core.running import Running
from quire.core.speculation import Speculation
from quire.core.stats import Blocker, Counters, SchedulerStats
from quire.core.step_budget import StepBudget
from quire.errors import InvalidRequest
from quire.request import Request


class Scheduler:
    """Turns requests into steps and results into tokens.

    A sequence waits in the `Queue` or is `Running`; `Requests` has them all. The `Planner` chooses the next step and
    `StepCompletion` applies its result. The tokens of a request do not depend on how it was scheduled. Owned by the
    engine thread.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        prefix_key: PrefixKey | None = None,
        switch_length: int | None = None,
    ) -> None:
        """`switch_length`: sequences that grow beyond it are computed anew."""
        self.limits = limits
        self.budget = StepBudget(limits)
        self.counters = Counters()
        self._clock = clock
        self._prefix_key, self._switch_length = prefix_key, switch_length
        self.adapters = AdapterSlots(limits.max_loras)
        self.start_over()

    def start_over(self) -> None:
        """Drop every request and all accounts, whatever state they are in: nothing is live, every page is free."""
        limits = self.limits
        self.adapters.start_over()
        self._in_flight: deque[StepInFlight] = deque()
        self._queue = Queue(limits, self._clock)
        self._running = Running(limits, self._queue, self.counters, self.adapters)
        speculation = Speculation(limits, self.budget, self.counters)
        how = self._prefix_key, speculation, self._switch_length
        self._requests = Requests(limits, self._queue, self._running, self._clock, *how)
        self._planner = Planner(limits, self.budget, self._queue, self._running, self.counters, speculation)
        self.exchange = PrefixExchange(limits, self._running, self._requests)
        self._completion = StepCompletion(self._running, self._requests, self.counters, speculation)

    def stats(self) -> SchedulerStats:
        """Any thread may call it: each number is right by itself."""
        running, counters, host = self._running, self.counters, self._running.host
        return SchedulerStats(
            num_running=len(running),
            num_waiting=len(self._queue),
            running_max_tokens=running.max_tokens,
            free_pages=running.pool.num_free,
            cached_pages=running.cache.num_evictable,
            evicted_pages=running.cache.num_evicted,
            host_pages=0 if host is None else len(host),
            saved_pages=0 if host is None else host.num_saved,
            restored_pages=0 if host is None else host.num_restored,
            lost_pages=0 if host is None else host.num_lost,
            snapshots=0 if running.snapshots is None else len(running.snapshots),
            steps=counters.steps,
            preemptions=counters.preemptions,
            admissions=counters.admissions,
            cached_tokens=counters.cached_tokens,
            guesses=counters.guesses,
            right_guesses=counters.right_guesses,
            guessed_chunks=counters.guessed_chunks,
            joined_by=dict(counters.joined_by),
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not completed."""
        return len(self._in_flight)

    @property
    def blocked_by(self) -> Blocker | None:
        """The limit that kept the head of the queue waiting in the last plan."""
        return self._planner.prompts.blocked_by

    def has(self, request_id: int) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[int]:
        return list(self._requests)

    # Coming and going

    def add(self, request: Request, bounded: bool = True, so_far: SoFar | None = None, waited_s: float = 0.0) -> None:
        """Queue a request, or refuse it: at once and for good, or with a time to try again.

        The engine's own requests are not `bounded` by the length of the queue. With `so_far` the request goes on where
        another engine left it, and is not bounded either: it was let in once. Its deadlines count from `waited_s` ago.
        """
        if self.has(request.request_id):
            raise InvalidRequest(f"request_id {request.request_id} is in use")
        self.limits.refuse_what_cannot_fit(request)
        if so_far is None:
            so_far = [()] * request.samples
            if bounded:
                self._queue.refuse_if_full(request)
        else:
            refuse_impossible_resume(request, so_far)
        self._requests.add(request, so_far, waited_s)

    def abort(self, request_id: int) -> None:
        """End a request now. Does nothing when it has ended already."""
        self._requests.abort(request_id)

    def force(self, request_id: int, sample: int, tokens: Iterable[int]) -> None:
        """The next tokens of a sample are certain to be these: its grammar allows no others. Steps then compute several
        at once, where no log-probabilities are wanted."""
        if not self.limits.forces_tokens:
            return
        for sequence in self._requests.sequences(request_id):
            if sequence.sample == sample and sequence.request.sampling.logprobs is None:
                sequence.force(tokens)

    def expire(self) -> list[Failure]:
        """End the requests past their deadline."""
        return self._requests.expire()

    def restart(self) -> None:
        """Begin again from the tokens on the host: everything on the device is gone."""
        self._running.abandon_moves(step.moves for step in self._in_flight)
        self._in_flight.clear()
        self._running.cache.clear()
        if self._running.snapshots is not None:
            self._running.snapshots.abandon_all()
        for sequence in self._running:
            self._running.preempt(sequence, keep_pages=False)
        self.adapters.clear()

    def focus(self, request_ids: Iterable[int] | None) -> None:
        """Run only these requests; the others return to the queue. None runs all again."""
        self.adapters.forget_reservation()
        if request_ids is None:
            self._queue.focus = None
            return
        chosen = [sequence for request_id in request_ids for sequence in self._requests.sequences(request_id)]
        self._queue.focus = chosen
        for sequence in self._running:
            if sequence not in chosen:
                self._running.preempt(sequence)

    # One step

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can be computed now."""
        step = self._planner.plan()
        if step is None:
            return None
        self._in_flight.append(step)
        return step.plan

    def complete(self, result: StepResult) -> tuple[list[Update], list[Failure]]:
        """Apply the result of the oldest step in flight."""
        self.budget.note_step()
        return self._completion.complete(self._in_flight.popleft(), result)

    # Accounts

    def repair(self, thorough: bool) -> list[str]:
        """At rest: find pages and slots that are lost or held twice, by counts only unless `thorough`.

        If there are any, all counts are reset and the cache is emptied. Returns the faults found.
        """
        is_at_rest = not self._requests and not self._in_flight and not self._running
        if not is_at_rest or (self._running.is_balanced and not thorough):
            return []
        lines = self._running.page_discrepancies() or (
            [] if self._running.is_balanced else ["a slot or a snapshot is lost, or a page of the host stays held"]
        )
        if lines:
            self.start_over()
        return lines

    @property
    def shortage(self) -> str:
        """The reason for which nothing is planned, in words."""
        blocked_by = self.blocked_by
        return "no limit holds it up" if blocked_by is None else f"it waits for {blocked_by.client_name}"

    def describe(self, request_ids: Iterable[int]) -> list[str]:
        """The state of the scheduler, and of each sequence of these requests, in a line each."""
        running, queue = self._running, self._queue
        pages = f"{running.pool.num_free} pages free, {running.cache.num_evictable} cached"
        limit = "nothing" if self.blocked_by is None else self.blocked_by.cause
        lines = [f"{len(running)} sequences run, {len(queue)} wait, {pages}, blocked by {limit}"]
        for request_id in request_ids:
            for sequence in self._requests.sequences(request_id):
                state = f"{len(sequence.tokens)} tokens of {sequence.limit}, {sequence.num_computed} computed"
                state = f"{sequence.state.name.lower()}: {state}, {sequence.num_planned} planned"
                lines.append(f"request {request_id}, sample {sequence.sample} is {state}")
            if request_id not in self._requests:
                lines.append(f"request {request_id} has no sequence")
        return lines

    def check(self) -> None:
        """Assert every invariant."""
        self._running.check()
        self._requests.check()
