"""The scheduler joined to an executor."""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from quire.core.limits import SoFar
from quire.core.plan import Failure, StepPlan, Update
from quire.core.scheduler import Scheduler
from quire.engine.accounts import Accounts
from quire.engine.burst_limit import BurstLimit
from quire.engine.executor import Executor, Pending, is_out_of_memory
from quire.engine.fault_isolation import PROBE, FaultIsolation, Suspect, suspects_of
from quire.engine.grammar_masks import GrammarMasks, Grammars, NoGrammars
from quire.engine.host_times import HostTimes
from quire.engine.step_traces import StepTraces
from quire.engine.step_under_way import NotLaunched, StepUnderWay
from quire.errors import EngineFailed, InvalidRequest, QuireError, RequestFailed
from quire.ipc.journal import Journal, Record
from quire.request import Request

log = logging.getLogger(__name__)

MAX_AUDIT_LINES = 20  # in the log


class Outcome(NamedTuple):
    """What happened to requests."""

    updates: list[Update]
    failures: list[Failure]


class Engine:
    """Launches steps, up to `lookahead` of them before the oldest has been collected, and survives those that fail.

    Has no thread of its own: whoever owns it calls `launch` and `collect`, or `step`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        lookahead: int = 1,
        grammars: Grammars | None = None,
        max_burst_s: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_burst_s`: how long a step may take in which sequences get several tokens."""
        if lookahead < 0:
            raise ValueError(f"lookahead is {lookahead}; it must be at least 0")
        scheduler.limits.refuse_what_cannot_fit(PROBE)  # it must be there when it is needed
        self.scheduler = scheduler
        self.error: EngineFailed | None = None  # set once the engine cannot run any more
        self.accounts = Accounts()
        self.traces = StepTraces()
        self.host_times = HostTimes(clock)
        self.num_faults = 0
        self.num_requests_blamed = 0
        self.num_repairs = 0  # of the accounts of pages
        self.num_shrinks = 0  # after the device had run out of memory
        self._executor = executor
        self._lookahead = lookahead
        self._in_flight: deque[StepUnderWay] = deque()
        self._pace = BurstLimit(scheduler, max_burst_s, clock) if scheduler.limits.max_burst > 1 else None
        self._broken = False  # the device state is not to be used before the next reset
        self._guides = GrammarMasks(grammars or NoGrammars(), scheduler)
        self._awaits_masks = False  # the last step under way is not sampled yet
        self._misguided: list[Failure] = []  # nobody has been told of them yet
        self._isolation = FaultIsolation()
        self._last_fault: Exception | None = None
        self.journal: Journal | None = None  # for the one that takes its place
        self._num_running = 0  # as the journal says

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not self.scheduler.num_requests

    @property
    def is_searching(self) -> bool:
        """Whether only some requests run, to find one that makes steps fail."""
        return self._isolation.focus is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, request: Request, so_far: SoFar | None = None, waited_s: float = 0.0) -> None:
        """Queue a request; raises what it is refused with.

        `so_far`: tokens that another engine generated for it. `waited_s`: the part of its time that has passed.
        """
        if self.error is not None:
            raise self.error
        if request.request_id < 0:
            raise InvalidRequest(f"request_id is {request.request_id}; it must be at least 0")
        from_here = so_far or [()] * request.samples
        matchers = self._guides.matchers(request, from_here)
        self.scheduler.add(request, so_far=so_far, waited_s=waited_s)
        self._guides.begin(request, from_here, matchers)
        if request.timings:
            self.accounts.open(request.request_id, self.scheduler.blocked_by)
        if request.traced:
            self.traces.open(request.request_id)

    def prepare(self, request: Request) -> "Future[None] | None":
        """What is worth waiting for before `request` is added, since it holds up every request there; None for most."""
        return self._guides.prepare(request)

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)
        self._guides.forget_ended()

    def upkeep(self) -> list[Failure]:
        """What must be seen to between steps: deadlines, and a search whose suspects may have left meanwhile."""
        failures = self.scheduler.expire()
        if self._isolation.focus is not None and self.error is None:
            failures += self._isolate()
        self._guides.forget_ended()
        return failures

    def launch(self) -> bool:
        """Plan and launch one step; False when there is none, or as many are under way as may be."""
        if len(self._in_flight) > self._lookahead or not self._let_sample() or self._broken:
            return False
        begun_s = self.host_times.now()
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.host_times.planned(plan, begun_s)
        self.accounts.planned(plan, self.scheduler.blocked_by)
        self.traces.launched(plan)
        self._awaits_masks = bool(plan.guided)
        if plan.started:
            self._write_journal()
        pending: Pending
        try:
            pending = self._executor.submit(plan)
        except Exception as error:  # whatever it is, the requests of this step must hear of it
            pending = NotLaunched(error)
            self._broken = True
        self._in_flight.append(StepUnderWay(plan, pending, begun_s))
        if self._pace is not None:
            self._pace.launched()
        return True

    def collect(self) -> Outcome:
        """Wait for the oldest step under way and hand out what came of it."""
        self._let_sample()
        misguided, self._misguided = self._misguided, []
        updates, failures = self._collect()
        self._guides.take(updates)
        self._guides.forget_ended()
        return Outcome(updates, misguided + failures)

    def _collect(self) -> Outcome:
        plan, pending, planned_s = self._in_flight.popleft()
        try:
            result = pending.result()
        except Exception as error:  # as above
            self.traces.collected(plan, worked=False)
            return self._recover(plan, error)
        self.traces.collected(plan, worked=True)
        begun_s = self.host_times.now()
        if self._pace is not None:
            self._pace.ended(plan)
        updates, failures = self.scheduler.complete(result)
        for failure in failures:
            log.warning("request %d is ended: %s", failure.request_id, failure.error)
        self.host_times.completed(plan, planned_s, begun_s)
        if self._num_running and not self.scheduler.num_running:
            self._write_journal()  # nobody is to be blamed for what happens from here on
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

    def _let_sample(self) -> bool:
        """Give the last step under way the masks it awaits; False while it has to wait for them.

        It gets them when it is the only one, as the tokens they follow from are known then. The device computes its
        logits meanwhile.
        """
        if not self._awaits_masks:
            return True
        if len(self._in_flight) > 1:
            return False
        step = self._in_flight[0]
        plan, pending = step.plan, step.pending
        self._awaits_masks = False
        masks, failures = self._guides.masks(plan)
        for failure in failures:
            log.warning("request %d is ended: %s", failure.request_id, failure.error)
            self.scheduler.abort(failure.request_id)
        self._misguided += failures
        try:
            pending.sample(masks)
        except Exception as error:  # as in `launch`
            self._in_flight[0] = step._replace(pending=NotLaunched(error))
            self._broken = True
        return True

    def audit(self, thorough: bool = False) -> None:
        """While idle: check that all pages are back. If they are not, log it and repair it."""
        lines = self.scheduler.repair(thorough)
        if lines:
            self.num_repairs += 1
            more = f" and {len(lines) - MAX_AUDIT_LINES} more" if len(lines) > MAX_AUDIT_LINES else ""
            found = "; ".join(lines[:MAX_AUDIT_LINES])
            log.error("the accounts of pages are wrong and begin anew, with an empty cache: %s%s", found, more)

    def check_device(self) -> None:
        """While it is idle: does the device still compute? Where not, set it up again, or give up."""
        try:
            self._executor.check_device()
            return
        except Exception as error:
            self._last_fault = error
        self.num_faults += 1
        log.error("the device fails while nothing runs: %r", self._last_fault)
        self.scheduler.restart()
        try:
            self._executor.reset()
            self._executor.check_device()
        except Exception as error:
            self._give_up(f"the device does not compute: {error!r}")

    def fail_all(self, error: QuireError) -> list[Failure]:
        """End every request with `error`. What is in flight is dropped when it is collected."""
        request_ids = self.scheduler.request_ids()
        for request_id in request_ids:
            self.scheduler.abort(request_id)
        return [Failure(request_id, error) for request_id in request_ids if request_id != PROBE.request_id]

    def start_over(self) -> None:
        """Drop every request and all that the device holds, whatever state an interrupt has left them in."""
        self._forget_steps()
        self._misguided.clear()
        self._isolation = FaultIsolation()
        self.scheduler.start_over()
        self._guides.forget_ended()
        self._executor.reset()
        self._broken = self.error is not None

    def _forget_steps(self) -> None:
        self._in_flight.clear()
        if self._pace is not None:
            self._pace.forget()
        self._awaits_masks = False

    def take_over(self, record: Record) -> list[int]:
        """Another engine ended while it ran the requests of `record`: its end was a fault, and they are suspects.

        Returns whom to wait for before `resume_search`, since targets are found in what they come back with.
        """
        self._isolation = FaultIsolation(record.search)
        if record.running:
            self.num_faults += 1
            self._last_fault = RuntimeError("the engine process ended while it ran this request")
            self._isolation.fault([Suspect(one) for one in record.running if one != PROBE.request_id])
        self._write_journal()
        return [suspect.request_id for suspect in self._isolation.suspects()]

    def resume_search(self) -> list[Failure]:
        """Whoever was to come back has come back. Those who have not are clear."""
        for suspect in self._isolation.suspects():
            for sample, (length, limit) in self.scheduler.lengths(suspect.request_id).items():
                # So many tokens were under way at most, and the last one is never computed.
                under_way = (self._lookahead + 1) * self.scheduler.limits.max_burst
                suspect.targets[sample] = min(length + under_way, limit - 1)
        return self._isolate() if self._isolation.focus is not None else []

    def _write_journal(self) -> None:
        if self.journal is not None:
            running = self.scheduler.running_requests()
            self._num_running = len(running)
            self.journal.write(Record(running, self._isolation.search))

    def _recover(self, plan: StepPlan, fault: Exception) -> Outcome:
        """A step failed and may have taken the device state with it: begin again and look for who is at fault."""
        self.num_faults += 1
        self._last_fault = fault
        log.error("step %d with %d rows failed: %r", plan.step, len(plan.chunks), fault)
        suspects = suspects_of(plan, self.scheduler.has)
        self._forget_steps()
        self.scheduler.restart()
        try:
            self._executor.reset()
        except Exception as error:
            return Outcome([], self._give_up(f"the device state could not be rebuilt: {error!r}"))
        self._broken = False
        if is_out_of_memory(fault) and self.scheduler.room.shrink(plan):
            self.num_shrinks += 1
            room = self.scheduler.room
            log.warning(
                "steps have at most %d tokens of prompts and %d rows for a while", room.prefill_tokens, room.rows
            )
            return Outcome([], [])
        self._isolation.fault(suspects)
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
        self._write_journal()
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
