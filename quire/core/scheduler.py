"""Decides which tokens each step computes."""

from collections import deque
from collections.abc import Callable, Iterable

from quire.core.audit import discrepancies
from quire.core.counters import Counters, SchedulerStats
from quire.core.limits import Limits, SoFar, refuse_what_cannot_go_on
from quire.core.live_sequences import LiveSequences, PrefixKey
from quire.core.plan import Failure, StepPlan, StepResult, Update
from quire.core.planner import Planner
from quire.core.room import Room
from quire.core.step_in_flight import StepInFlight
from quire.errors import InvalidRequest
from quire.request import Request


class Scheduler:
    """Turns requests into steps and results into tokens.

    What is live is in `LiveSequences`, what the next step holds is up to the `Planner`, and a `StepInFlight` knows what
    its result means. The tokens of a request do not depend on how it was scheduled. Owned by the engine thread.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        prefix_key: PrefixKey | None = None,
    ) -> None:
        self.limits = limits
        self.room = Room(limits)
        self.counters = Counters()
        self._live = LiveSequences(limits, clock, self.counters, prefix_key)
        self._planner = Planner(limits, self.room, self._live)
        self._in_flight: deque[StepInFlight] = deque()

    def stats(self) -> SchedulerStats:
        """Any thread may call it: each number is right by itself."""
        live, counters = self._live, self.counters
        return SchedulerStats(
            num_running=len(live.running),
            num_waiting=len(live.queue),
            running_max_tokens=live.running.max_tokens,
            free_pages=live.pool.num_free,
            cached_pages=live.cache.num_evictable,
            evicted_pages=live.cache.num_evicted,
            steps=counters.steps,
            preemptions=counters.preemptions,
            admissions=counters.admissions,
            cached_tokens=counters.cached_tokens,
            joined_by=dict(counters.joined_by),
        )

    # What is there

    @property
    def num_running(self) -> int:
        return len(self._live.running)

    @property
    def running_max_tokens(self) -> int:
        """Tokens that the running sequences may ever have, prompts included."""
        return self._live.running.max_tokens

    @property
    def num_waiting(self) -> int:
        return len(self._live.queue)

    @property
    def num_requests(self) -> int:
        return len(self._live.requests)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not completed."""
        return len(self._in_flight)

    @property
    def num_free_pages(self) -> int:
        return self._live.pool.num_free

    @property
    def num_cached_pages(self) -> int:
        """Pages that the prefix cache would give up."""
        return self._live.cache.num_evictable

    @property
    def num_evicted_pages(self) -> int:
        return self._live.cache.num_evicted

    def request_ids(self) -> list[int]:
        return list(self._live.requests)

    def has(self, request_id: int) -> bool:
        return request_id in self._live.requests

    def running_requests(self) -> list[int]:
        """The requests that have a slot."""
        return list(dict.fromkeys(sequence.request_id for sequence in self._live.running))

    def lengths(self, request_id: int) -> dict[int, tuple[int, int]]:
        """By live sample of a request: the tokens it has, and as many as it may ever have."""
        return {one.sample: (len(one.tokens), one.limit) for one in self._live.requests.get(request_id, ())}

    def num_computed(self, request_id: int, sample: int) -> int | None:
        """Positions of a sample that results have confirmed since it last got its slot; None once it has ended."""
        live = self._live.requests.get(request_id, ())
        return next((sequence.num_computed for sequence in live if sequence.sample == sample), None)

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
        else:
            bounded = False
            refuse_what_cannot_go_on(request, so_far)
        if bounded:
            self._live.queue.refuse_if_full(request)
        self._live.add(request, so_far, waited_s)

    def abort(self, request_id: int) -> None:
        """End a request now; a request that has ended already is none."""
        self._live.abort(request_id)

    def expire(self) -> list[Failure]:
        """End the requests whose time has passed."""
        return self._live.expire()

    def restart(self) -> None:
        """Begin again from the tokens on the host: everything on the device is gone."""
        self._in_flight.clear()
        self._live.restart()

    def start_over(self) -> None:
        """Drop every request and all accounts, whatever state they are in: nothing is live, every page is free."""
        self._in_flight.clear()
        self._live.begin_anew()

    def focus(self, request_ids: Iterable[int] | None) -> None:
        """Run only these requests until told otherwise; None runs all again."""
        self._live.focus_on(request_ids)

    # One step

    @property
    def burst(self) -> int:
        """Tokens that a step may give each sequence; whoever knows how long they take may allow fewer."""
        return self._planner.burst

    @burst.setter
    def burst(self, num_tokens: int) -> None:
        self._planner.burst = num_tokens

    @property
    def blocked_by(self) -> str | None:
        """What kept the head of the queue waiting in the last plan."""
        return self._planner.blocked_by

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can be computed now."""
        step = self._planner.plan()
        if step is None:
            return None
        self._in_flight.append(step)
        return step.plan

    def complete(self, result: StepResult) -> tuple[list[Update], list[Failure]]:
        """Take in the result of the oldest step in flight."""
        step = self._in_flight.popleft()
        self.room.note_step()
        return step.complete(result, self._live)

    # Accounts

    @property
    def is_at_rest(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._live.requests and not self._in_flight and not self.num_running

    @property
    def is_balanced(self) -> bool:
        """Whether at rest all pages and slots are back, as far as counts tell."""
        live = self._live
        return live.pool.num_free + live.cache.num_evictable == live.pool.num_usable and live.running.has_all_slots

    def discrepancies(self) -> list[str]:
        """What is wrong with the accounts of pages, page by page."""
        return discrepancies(self._live.pool, self._live.cache, self._live.running)

    def repair(self, thorough: bool) -> list[str]:
        """At rest: find pages and slots that are lost or held twice, by counts alone unless `thorough`.

        If there are any the accounts begin anew, with an empty cache. Returns what was wrong.
        """
        if not self.is_at_rest or (self.is_balanced and not thorough):
            return []
        lines = self.discrepancies() or ([] if self.is_balanced else ["a slot is lost"])
        if lines:
            self._live.begin_anew()
        return lines

    def check(self) -> None:
        """Assert every invariant."""
        self._live.check()
