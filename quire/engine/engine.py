"""The scheduler joined to an executor."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from quire.core.limits import SoFar
from quire.core.plan import Failure, StepResult, Update
from quire.core.scheduler import Scheduler
from quire.engine.adapters import LoadedAdapters, Read
from quire.engine.executor import Executor, is_out_of_memory
from quire.engine.fault_isolation import PROBE, FaultIsolation, targets_of
from quire.engine.grammar_masks import GrammarMasks, Grammars, NoGrammars
from quire.engine.group import Group
from quire.engine.limits.step_limits import StepLimits
from quire.engine.observer import Judge, Observer, Observers, Step
from quire.engine.outcome import Outcome
from quire.engine.pages.sources import PageSources
from quire.engine.step_pipeline import StepPipeline
from quire.errors import EngineFailed, InvalidRequest, InvalidSetting, RequestFailed, reason_of
from quire.ipc.journal import Journal
from quire.request import Request

log = logging.getLogger(__name__)

MAX_AUDIT_LINES = 20  # in the log
# Plans in a row that may be empty while requests live and no step is under way. One may be: a sequence can give up its
# slot while a step is planned.
MAX_EMPTY_PLANS = 3


class Engine:
    """Launches steps, up to `lookahead` of them before the oldest has been collected, and survives those that fail.

    Has no thread of its own: its owner calls `launch` and `collect`, or `step`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        lookahead: int = 1,
        grammars: Grammars | None = None,
        max_burst_s: float = 0.01,
        max_step_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        read_adapter: Read | None = None,
    ) -> None:
        """`max_burst_s`: the longest step in which sequences get several tokens. `max_step_s`: the longest step with
        prompts and decodes; 0 for no limit. `read_adapter` reads an adapter's folder; None where there are none."""
        if lookahead < 0:
            raise ValueError(f"lookahead is {lookahead}; it must be at least 0")
        scheduler.limits.refuse_what_cannot_fit(PROBE)  # it must be there when it is needed
        self.scheduler = scheduler
        self.clock = clock
        self.group: Group | None = None  # other processes that compute every step with the executor
        self.page_sources = PageSources()  # a folder and other engines that pages are exchanged with
        self.error: EngineFailed | None = None  # set once the engine cannot run any more
        self.num_faults = 0
        self.num_requests_blamed = 0
        self.num_repairs = 0  # of the accounts of pages
        self.num_shrinks = 0  # after the device had run out of memory
        # Done while idle, a little in each call, which returns the seconds after which to go on; None at its end.
        self.idle_work: Callable[[], float | None] | None = None
        self._lookahead = lookahead
        self._steps = StepPipeline(executor, clock)
        self.adapters = LoadedAdapters(scheduler.adapters, lambda: self.executor, read_adapter)
        self.step_limits = StepLimits(scheduler, max_burst_s, max_step_s)
        self.observe(self.step_limits)
        self._samples_left: dict[int, int] = {}  # by live request, the probe included
        self._check_since_s: float | None = None  # of the device, or of a reset
        self._masks = GrammarMasks(grammars or NoGrammars(), clock)
        self._grammar_failures: list[Failure] = []  # not returned yet
        self._isolation = FaultIsolation(scheduler)
        self._last_fault: Exception | None = None
        self._num_empty_plans = 0  # in a row, while requests live and no step is under way

    def observe(self, observer: Observer) -> None:
        self._steps.observers.attach(observer)

    def judge(self, judge: Judge) -> None:
        """From now on `judge` decides after each step whether the engine goes on."""
        self._steps.judges.append(judge)

    @property
    def observers(self) -> Observers:
        return self._steps.observers

    @property
    def last_end_s(self) -> float:
        """The time at which the last step ended; of the engine's start before there is one. Any thread may read it."""
        return self._steps.last_end_s

    # Of the step that the engine waits for. Any thread may read them.

    @property
    def busy_s(self) -> float:
        """Time that the step under way has taken; 0 if there is none."""
        return self._steps.busy_s

    @property
    def num_step_tokens(self) -> int:
        """Tokens of the step under way; 0 if there is none."""
        return self._steps.num_tokens

    @property
    def is_compiling(self) -> bool:
        """The step under way has waited for a program to compile."""
        return self._steps.is_compiling

    @property
    def executor(self) -> Executor:
        return self._steps.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self._steps.executor = executor

    @property
    def is_idle(self) -> bool:
        return not self._steps and not self._samples_left

    @property
    def is_searching(self) -> bool:
        """True while only some requests run, to find the one that makes steps fail."""
        return self._isolation.focus is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def checking_s(self) -> float | None:
        """Time that a check or a reset of the device has taken; None if there is none. Any thread may read it."""
        since_s = self._check_since_s
        return None if since_s is None else self.clock() - since_s

    def add(self, request: Request, so_far: SoFar | None = None, waited_s: float = 0.0) -> None:
        """Queue a request, or raise why it is refused.

        `so_far`: tokens that another engine generated for it. `waited_s`: the part of its time that has passed.
        """
        if self.error is not None:
            raise self.error
        if request.request_id < 0:
            raise InvalidRequest(f"request_id is {request.request_id}; it must be at least 0")
        from_here = so_far or [()] * request.samples
        matchers = self._masks.matchers(request, from_here)
        self.scheduler.add(request, so_far=so_far, waited_s=waited_s)
        self._samples_left[request.request_id] = sum(tokens is not None for tokens in from_here)
        self._num_empty_plans = 0  # it may run
        self._masks.begin(request, from_here, matchers)
        # The most tokens that the last engine had under way; the last token is never computed.
        under_way = (self._lookahead + 1) * self.scheduler.limits.max_tokens_of(request)
        self._isolation.request_added(request, from_here, under_way)

    def prepare(self, request: Request) -> "Future[None] | None":
        """Compile the grammar of `request`, if it has one that is not compiled. It should be added afterwards."""
        return self._masks.prepare(request)

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)
        self._forget(request_id)

    def upkeep(self) -> list[Failure]:
        """Work between steps: deadlines, and the search for a faulty request, if suspects have left."""
        failures = self.scheduler.expire()
        self._note_ends((), failures)
        if self._isolation.focus is not None and self.error is None:
            failures += self._isolate()
        if self._num_empty_plans >= MAX_EMPTY_PLANS:
            self._num_empty_plans = 0
            failures += self._end_standstill()
        return failures

    def launch(self) -> bool:
        """Plan and launch one step; False if there is none, or as many are under way as may be."""
        steps = self._steps
        if len(steps) > self._lookahead or not self._send_masks() or steps.has_failed or self.error is not None:
            return False
        planned_s = self.clock()
        for forced in self._masks.forced():
            self.scheduler.force(*forced)
        plan = self.scheduler.plan()
        if plan is None:
            self._num_empty_plans = 0 if steps or not self._samples_left else self._num_empty_plans + 1
            return False
        self._num_empty_plans = 0
        self._isolation.step_launched(plan)
        steps.launch(plan, planned_s, self.scheduler.blocked_by)
        return True

    def collect(self) -> Outcome:
        """Wait for the oldest step under way and apply its result."""
        self._send_masks()
        grammar_failures, self._grammar_failures = self._grammar_failures, []
        step, result = self._steps.collect()
        outcome = Outcome([], self._recover(step)) if result is None else self._complete(step, result)
        return outcome._replace(failures=grammar_failures + outcome.failures) if grammar_failures else outcome

    def delivered(self) -> None:
        """The outcome of the step collected last is on its way to the front ends."""
        self._steps.delivered()

    def step(self) -> Outcome:
        """Launch what can be launched, then collect one step."""
        failures = self.upkeep()
        while self.launch():
            pass
        if not self._steps:
            return Outcome([], failures)
        outcome = self.collect()
        return outcome._replace(failures=failures + outcome.failures)

    def _complete(self, step: Step, result: StepResult) -> Outcome:
        updates, failures = self.scheduler.complete(result)
        for failure in failures:
            log.warning("request %d is ended: %s", failure.request_id, failure.error)
        self._isolation.step_worked(step.plan)
        finished = self._note_ends(updates, failures)
        self._masks.advance(updates)
        self._steps.completed(step)
        if self._isolation.is_probing:
            return self._probe_ended(updates, failures)
        return Outcome(updates, failures, finished)

    def _note_ends(self, updates: Iterable[Update], failures: Iterable[Failure]) -> list[int]:
        """Forget the requests that have ended. Returns those of which every sample has finished."""
        finished: list[int] = []
        for update in updates:
            if update.finish is not None:
                self._isolation.sample_ended(update.request_id, update.sample)
                self._samples_left[update.request_id] -= 1
                if not self._samples_left[update.request_id]:
                    finished.append(update.request_id)
        for request_id in (*finished, *(failure.request_id for failure in failures)):
            self._forget(request_id)
        return finished

    def _forget(self, request_id: int) -> None:
        self._samples_left.pop(request_id, None)
        self._num_empty_plans = 0  # others may run with what it held
        self.adapters.drop_unused()
        self._masks.forget(request_id)
        self._isolation.request_ended(request_id)

    def _send_masks(self) -> bool:
        """Give the last step under way the masks it waits for; False while they cannot be known.

        They are known once it is the only step, since they follow from the tokens of the steps before. The device
        computes its logits meanwhile.
        """
        if not self._steps.awaits_masks or len(self._steps) > 1:
            return not self._steps.awaits_masks
        masks, failures = self._masks.masks(self._steps.newest)
        for failure in failures:
            log.warning("request %d is ended: %s", failure.request_id, failure.error)
            self.abort(failure.request_id)
        self._grammar_failures += failures
        self._steps.sample(masks)
        return True

    def _end_standstill(self) -> list[Failure]:
        """End the requests that may run, of which none is planned. Nothing that they could wait for is left: their
        adapters, grammars and pages from elsewhere were there before they came, and no step is under way."""
        focus = self._isolation.focus
        stuck = [request_id for request_id in self._samples_left if focus is None or request_id in focus]
        if not stuck:
            return []
        error = RequestFailed(f"no step is planned for this request, and none is under way: {self.scheduler.shortage}")
        state = "; ".join(self.scheduler.describe(stuck)[:MAX_AUDIT_LINES])
        log.error("no step is planned for %d requests, which are ended: %s", len(stuck), state)
        self._last_fault = error
        if PROBE.request_id in stuck:
            return self._give_up("no step can be planned", error)
        for request_id in stuck:
            self.abort(request_id)
        self.audit(thorough=True)  # what is lost may be why
        return [Failure(request_id, error) for request_id in stuck]

    def audit(self, thorough: bool = False) -> None:
        """While idle: check that all pages are back. If they are not, log it and repair it."""
        lines = self.scheduler.repair(thorough)
        if lines:
            self.num_repairs += 1
            faults = "; ".join(lines[:MAX_AUDIT_LINES])
            log.error("%d faults in the counts of pages; they are reset, with an empty cache: %s", len(lines), faults)

    def check_device(self, work: Callable[[], None] | None = None) -> None:
        """While idle: check that the device computes, by `work` if given. If it does not, reset it, or give up."""
        try:
            with self._checking_device():
                (work or self.executor.check_device)()
            return
        except Exception as error:
            self._last_fault = error
        self.num_faults += 1
        log.error("the device fails while nothing runs: %r", self._last_fault)
        self.scheduler.restart()
        try:
            self._reset_device()
            with self._checking_device():
                self.executor.check_device()
        except Exception as error:
            self._give_up("the device does not compute", error)

    @contextmanager
    def _checking_device(self) -> Iterator[None]:
        self._check_since_s = self.clock()
        try:
            yield
        finally:
            self._check_since_s = None

    def start_over(self) -> None:
        """Drop every request and all that the device holds, whatever state an interrupt has left them in."""
        self._steps.discard()
        self._grammar_failures.clear()
        self._isolation = FaultIsolation(self.scheduler)
        self.scheduler.start_over()
        for request_id in list(self._samples_left):
            self._forget(request_id)
        self._reset_device()

    def _reset_device(self) -> None:
        with self._checking_device():
            self.executor.reset()
        self._steps.has_failed = False

    def take_over(self, journal: Journal) -> list[int]:
        """Continue `journal`. Requests in it are suspects: another engine ended while it ran them.

        Returns the requests to wait for before `resume_search`, since targets are found in what they come back with.
        """
        record = journal.read()
        self._isolation = FaultIsolation(self.scheduler, journal, record.search)
        if record.running:
            self.num_faults += 1
            self._last_fault = RequestFailed("the engine process ended while it ran this request")
            self._isolation.fault({request_id: {} for request_id in record.running if request_id != PROBE.request_id})
        return self._isolation.suspects()

    def resume_search(self) -> list[Failure]:
        """All suspects that come back have come back. The others are clear."""
        return self._isolate() if self._isolation.focus is not None else []

    def _recover(self, step: Step) -> list[Failure]:
        """A step failed, and may have taken the device state with it: begin again, and search for the cause."""
        plan, fault = step.plan, step.error
        assert fault is not None
        self.num_faults += 1
        self._last_fault = fault
        log.error("step %d with %d rows failed: %r", plan.step, len(plan.chunks), fault)
        self._steps.discard()
        self.scheduler.restart()
        if isinstance(fault, InvalidSetting):  # any request would meet it again
            return self._give_up("the engine cannot run as it is set", fault)
        try:
            self._reset_device()
        except Exception as error:
            return self._give_up("the device state could not be rebuilt", error)
        if is_out_of_memory(fault) and self.scheduler.budget.shrink(plan):
            self.num_shrinks += 1
            budget = self.scheduler.budget
            tokens, rows = budget.prefill_tokens, budget.rows
            singly = ", each with one token of an answer," if budget.decodes_singly else ""
            log.warning("steps have at most %d tokens of prompts and %d rows%s for a while", tokens, rows, singly)
            return []
        self._isolation.fault(targets_of(plan, self._samples_left))
        return self._isolate()

    def _isolate(self) -> list[Failure]:
        """Run the requests that the search wants to see next."""
        if self._isolation.is_probing and PROBE.request_id not in self._samples_left:
            self.scheduler.add(PROBE, bounded=False)
            self._samples_left[PROBE.request_id] = 1
        self._isolation.advance()
        if self._isolation.is_hopeless:
            return self._give_up("steps fail with any request", self._last_fault)
        return []

    def _probe_ended(self, updates: list[Update], failures: list[Failure]) -> Outcome:
        """Only the probe runs while it does, and one step is all it takes."""
        if failures:  # its row has no result although the step worked
            self._last_fault = failures[0].error
            self._isolation.fault({})
            return Outcome([], self._isolate())
        if not updates:
            return Outcome()
        return Outcome([], self._blame(self._isolation.probe_worked()) + self._isolate())

    def _blame(self, request_id: int | None) -> list[Failure]:
        if request_id not in self._samples_left:
            return []  # none is found yet, or it has left meanwhile
        self.num_requests_blamed += 1
        log.error("request %d makes its steps fail and is ended: %r", request_id, self._last_fault)
        self.abort(request_id)
        return [Failure(request_id, RequestFailed(f"the steps of this request fail: {reason_of(self._last_fault)}"))]

    def _give_up(self, problem: str, cause: Exception | None) -> list[Failure]:
        """End every request. Results of steps under way are dropped when they are collected."""
        self.error = EngineFailed(f"{problem}: {reason_of(cause)}")
        log.critical("the engine gives up: %s: %r", problem, cause)
        request_ids = list(self._samples_left)
        for request_id in request_ids:
            self.abort(request_id)
        return [Failure(request_id, self.error) for request_id in request_ids if request_id != PROBE.request_id]
