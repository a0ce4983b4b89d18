"""The scheduler joined to an executor."""

import logging
from collections import deque
from typing import NamedTuple

from quire.core.plan import Failure, StepPlan, StepResult, Update
from quire.core.scheduler import Scheduler
from quire.engine.executor import Executor, Pending
from quire.engine.isolation import PROBE, Isolation, Suspect
from quire.errors import EngineFailed, InvalidRequest, QuireError, RequestFailed
from quire.request import Request

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What happened to requests."""

    updates: list[Update]
    failures: list[Failure]


class NotLaunched:
    """Stands in line for a step that could not be submitted, so that faults are met in the order of the steps."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class Engine:
    """Launches steps, up to `lookahead` of them before the oldest has been collected, and survives those that fail.

    Has no thread of its own: whoever owns it calls `launch` and `collect`, or `step`.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, lookahead: int = 1) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead is {lookahead}; it must be at least 0")
        scheduler.limits.refuse_what_cannot_fit(PROBE)  # it must be there when it is needed
        self.scheduler = scheduler
        self.error: EngineFailed | None = None  # set once the engine cannot run any more
        self.num_faults = 0
        self.num_requests_blamed = 0
        self._executor = executor
        self._lookahead = lookahead
        self._in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self._broken = False  # the device state is not to be used before the next reset
        self._isolation = Isolation()
        self._last_fault: Exception | None = None

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not self.scheduler.num_requests

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request; raises what it is refused with."""
        if self.error is not None:
            raise self.error
        if request.request_id < 0:
            raise InvalidRequest(f"request_id is {request.request_id}; it must be at least 0")
        self.scheduler.add(request)

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)

    def upkeep(self) -> list[Failure]:
        """What must be seen to between steps: deadlines, and a search whose suspects may have left meanwhile."""
        failures = self.scheduler.expire()
        if self._isolation.focus is not None and self.error is None:
            failures += self._isolate()
        return failures

    def launch(self) -> bool:
        """Plan and launch one step; False when there is none, or as many are under way as may be."""
        if len(self._in_flight) > self._lookahead or self._broken:
            return False
        plan = self.scheduler.plan()
        if plan is None:
            return False
        pending: Pending
        try:
            pending = self._executor.submit(plan)
        except Exception as error:  # whatever it is, the requests of this step must hear of it
            pending = NotLaunched(error)
            self._broken = True
        self._in_flight.append((plan, pending))
        return True

    def collect(self) -> Outcome:
        """Wait for the oldest step under way and hand out what came of it."""
        plan, pending = self._in_flight.popleft()
        try:
            result = pending.result()
        except Exception as error:  # as above
            return self._recover(plan, error)
        updates, failures = self.scheduler.complete(result)
        if self._isolation.is_probing:
            return self._probe_ended(updates, failures)
        if self._isolation.is_counting and any(update.finish is not None for update in updates):
            self._isolation.request_finished()
        return Outcome(updates, failures)

    def step(self) -> Outcome:
        """Launch what can be launched, then collect one step."""
        failures = self.upkeep()
        while self.launch():
            pass
        if not self._in_flight:
            return Outcome([], failures)
        outcome = self.collect()
        return Outcome(outcome.updates, failures + outcome.failures)

    def fail_all(self, error: QuireError) -> list[Failure]:
        """End every request with `error`. What is in flight is dropped when it is collected."""
        request_ids = self.scheduler.request_ids()
        for request_id in request_ids:
            self.scheduler.abort(request_id)
        return [Failure(request_id, error) for request_id in request_ids if request_id != PROBE.request_id]

    def _recover(self, plan: StepPlan, fault: Exception) -> Outcome:
        """A step failed and may have taken the device state with it: begin again and look for who is at fault."""
        self.num_faults += 1
        self._last_fault = fault
        log.error("step %d with %d rows failed: %r", plan.step, len(plan.chunks), fault)
        suspects: dict[int, Suspect] = {}
        for chunk in plan.chunks:
            request_id = self.scheduler.request_of(chunk.sequence_id)
            if request_id is not None:
                suspect = suspects.setdefault(request_id, Suspect(request_id))
                suspect.targets[chunk.sequence_id] = chunk.start + chunk.length
        self._in_flight.clear()
        self.scheduler.restart()
        try:
            self._executor.reset()
        except Exception as error:
            return Outcome([], self._give_up(f"the device state could not be rebuilt: {error!r}"))
        self._broken = False
        self._isolation.fault(list(suspects.values()))
        return Outcome([], self._isolate())

    def _isolate(self) -> list[Failure]:
        """Run those the search wants to see next."""
        isolation = self._isolation
        isolation.advance(self.scheduler.num_computed)
        if isolation.is_hopeless:
            return self._give_up(f"steps fail whoever takes part: {self._last_fault!r}")
        if isolation.is_probing and not self.scheduler.has(PROBE.request_id):
            self.scheduler.add(PROBE, bounded=False)
        self.scheduler.focus(isolation.focus)
        return []

    def _probe_ended(self, updates: list[Update], failures: list[Failure]) -> Outcome:
        """Only the probe runs while it does, and one step is all it takes."""
        if failures:  # its row has no result although the step worked
            self._last_fault = failures[0].error
            self._isolation.fault([])
            return Outcome([], self._isolate())
        if not updates:
            return Outcome([], [])
        return Outcome([], self._blame(self._isolation.probe_worked()) + self._isolate())

    def _blame(self, request_id: int | None) -> list[Failure]:
        if request_id is None or not self.scheduler.has(request_id):
            return []  # nobody yet, or it has left meanwhile
        self.num_requests_blamed += 1
        log.error("request %d makes its steps fail and is ended: %r", request_id, self._last_fault)
        self.scheduler.abort(request_id)
        return [Failure(request_id, RequestFailed(f"the steps of this request fail: {self._last_fault!r}"))]

    def _give_up(self, reason: str) -> list[Failure]:
        self.error = EngineFailed(reason)
        self._broken = True
        log.critical("the engine gives up: %s", reason)
        return self.fail_all(self.error)
