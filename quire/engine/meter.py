"""What steps take, and what they hold."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from quire.core.plan import Kind, StepPlan, StepResult
from quire.core.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.executor import Executor, Pending
from quire.engine.grammar_masks import Grammars
from quire.engine.work_log import WorkLog
from quire.ipc.messages import Stats
from quire.ipc.watchdog_timeout import LongestStep

DURATIONS_S = tuple(0.00015 * 1.5**k for k in range(35))
BATCH_SIZES = tuple(range(1, 1025))
PREFILL, DECODE = "prefill", "decode"
# The host's work on a step: it takes in the result, hands out the tokens, plans a step in which sequences join others.
# `inference` is all of a step, from its plan until its tokens are handed out.
HOST_WORK = (
    *(f"{kind}_{part}" for kind in (PREFILL, DECODE) for part in ("complete", "deliver", "inference")),
    "join",
)
MAX_STARTED = 4096


class Begun(NamedTuple):
    """A step under way."""

    kind: str
    at_s: float
    num_tokens: int
    num_late: int  # programs compiled late before it


class Meter(Executor):
    """An executor that watches another. Written by the engine thread; others read single numbers of it.

    A step is a prefill when it computes any prompt, as its clients' tokens wait for the prompt then.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        num_late: Callable[[], int] = lambda: 0,
    ) -> None:
        self.durations = {kind: [0] * (len(DURATIONS_S) + 1) for kind in (PREFILL, DECODE, *HOST_WORK)}
        self.seconds = dict.fromkeys(self.durations, 0.0)
        self.batch_sizes = [0] * (len(BATCH_SIZES) + 1)
        self.batch_size_sum = 0
        self.tokens = {PREFILL: 0, DECODE: 0}
        self.num_begun = {PREFILL: 0, DECODE: 0}  # each of them is under way, has a duration, or failed
        self.num_failed = {PREFILL: 0, DECODE: 0}
        self.longest_s = 0.0
        self.last_end_s = clock()
        self._started_s: dict[int, float] = {}  # when requests got their first slot, until it is asked for
        self._executor = executor
        self._scheduler = scheduler
        self._clock = clock
        self._num_late = num_late
        self._under_way: list[Begun] = []  # oldest first
        self._most_tokens = 0  # in a step that worked
        self._check_begun_s: float | None = None
        self._work_log = WorkLog(scheduler, self.tokens)

    def busy_s(self) -> float:
        """How long the step that is under way has taken; 0 when none is."""
        oldest = self._under_way[:1]
        return self._clock() - max(oldest[0].at_s, self.last_end_s) if oldest else 0.0

    @property
    def longest(self) -> LongestStep:
        return LongestStep(self.longest_s, self._most_tokens)

    @property
    def num_tokens(self) -> int:
        """Of the step that is under way; 0 when none is."""
        oldest = self._under_way[:1]
        return oldest[0].num_tokens if oldest else 0

    def limit_s(self) -> float | None:
        """How long the step that is under way may take by what others took; None where none before it tells."""
        return self.longest.limit_s(self.num_tokens)

    def is_compiling(self) -> bool:
        """Whether the step that is under way has had to wait for a program to be compiled."""
        oldest = self._under_way[:1]
        return bool(oldest) and oldest[0].num_late != self._num_late()

    def idle_s(self) -> float:
        """Since the last step that finished."""
        return self._clock() - self.last_end_s

    def submit(self, plan: StepPlan) -> Pending:
        now = self._clock()
        num_decodes = sum(1 for chunk in plan.chunks if chunk.kind is Kind.DECODE)
        kind = DECODE if num_decodes == len(plan.chunks) else PREFILL
        if plan.burst > 1:
            num_decodes = plan.num_tokens
        num_tokens = num_decodes if kind is DECODE else plan.num_tokens
        self.tokens[DECODE] += num_decodes
        self.tokens[PREFILL] += num_tokens - num_decodes
        if plan.started:
            self._note_starts(plan, now)
            self.batch_sizes[bisect_left(BATCH_SIZES, len(plan.started))] += 1
            self.batch_size_sum += len(plan.started)
        self.num_begun[kind] += 1
        begun = Begun(kind, now, num_tokens, self._num_late())
        self._under_way.append(begun)
        try:
            return Timed(self._executor.submit(plan), self)
        except BaseException:
            self._under_way.remove(begun)
            self.num_failed[kind] += 1
            raise

    def _note_starts(self, plan: StepPlan, now: float) -> None:
        fresh = {start.slot for start in plan.started if not start.generated}
        for chunk in plan.chunks:
            if chunk.slot in fresh:
                self._started_s.setdefault(chunk.request_id, now)
        if len(self._started_s) > MAX_STARTED:  # some ended before anybody asked
            self._started_s = {one: at for one, at in self._started_s.items() if self._scheduler.has(one)}

    def pop_start_s(self, request_id: int) -> float | None:
        """When a request got its first slot. Told once."""
        return self._started_s.pop(request_id, None)

    def ended(self, worked: bool) -> None:
        """The oldest step under way has."""
        now = self._clock()
        begun = self._under_way.pop(0)
        took_s = now - max(begun.at_s, self.last_end_s)
        self.last_end_s = now
        self._work_log.add(took_s)
        if not worked:
            self.num_failed[begun.kind] += 1
            return
        self._most_tokens = max(self._most_tokens, begun.num_tokens)  # first: others read it once there is a longest
        if begun.num_late == self._num_late():  # else it waited for a compiler, which says nothing of steps
            self.longest_s = max(self.longest_s, took_s)
        self.note(begun.kind, took_s)

    def note(self, what: str, took_s: float) -> None:
        """A step, or the host's part of one, took so long."""
        self.durations[what][bisect_left(DURATIONS_S, took_s)] += 1
        self.seconds[what] += took_s

    def reset(self) -> None:
        for begun in self._under_way:  # discarded behind one that failed
            self.num_failed[begun.kind] += 1
        self._under_way.clear()
        with self._checking():
            self._executor.reset()

    def check_device(self) -> None:
        with self._checking():
            self._executor.check_device()

    @contextmanager
    def _checking(self) -> Iterator[None]:
        self._check_begun_s = self._clock()
        try:
            yield
        finally:
            self._check_begun_s = None

    def checking_s(self) -> float | None:
        """How long the device has been checked, or set up again; None when it is not."""
        begun_s = self._check_begun_s
        return None if begun_s is None else self._clock() - begun_s

    def warm_up(self) -> Iterator[float]:
        return self._executor.warm_up()

    def close(self) -> None:
        self._executor.close()


class Timed:
    """A step under way whose end is noted."""

    def __init__(self, pending: Pending, meter: Meter) -> None:
        self._pending = pending
        self._meter = meter

    def sample(self, masks: dict[int, bytes]) -> None:
        """No other step is under way, and one that fails here has no result."""
        try:
            self._pending.sample(masks)
        except BaseException:
            self._meter.ended(worked=False)
            raise

    def result(self) -> StepResult:
        worked = False
        try:
            result = self._pending.result()
            worked = True
            return result
        finally:
            self._meter.ended(worked)


class Metered(NamedTuple):
    """An engine whose executor is the meter."""

    engine: Engine
    meter: Meter
    platform: str
    num_late: Callable[[], int]  # programs compiled while requests waited for them


def metered(
    scheduler: Scheduler,
    executor: Executor,
    lookahead: int,
    platform: str,
    num_late: Callable[[], int],
    grammars: Grammars | None = None,
    max_burst_s: float = 0.01,
    clock: Callable[[], float] = time.monotonic,
) -> Metered:
    meter = Meter(executor, scheduler, clock, num_late)
    engine = Engine(scheduler, meter, lookahead, grammars, max_burst_s, clock)
    engine.host_times.note = meter.note
    return Metered(engine, meter, platform, num_late)


def read_stats(metered: Metered) -> Stats:
    """Numbers of this moment, each by itself: other threads go on meanwhile."""
    engine, meter, _, num_late = metered
    scheduler = engine.scheduler
    counters = scheduler.counters
    limits = scheduler.limits
    return Stats(
        busy_s=meter.busy_s(),
        longest_step_s=meter.longest_s,
        idle_s=meter.idle_s(),
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        running_max_tokens=scheduler.running_max_tokens,
        free_pages=scheduler.num_free_pages,
        cached_pages=scheduler.num_cached_pages,
        num_pages=limits.num_pages - 1,
        max_total_tokens=limits.max_batch_total_tokens or (limits.num_pages - 1) * limits.page_size,
        counters={
            "steps": counters.steps,
            "preemptions": counters.preemptions,
            "admissions": counters.admissions,
            "cached_tokens": counters.cached_tokens,
            "evicted_pages": scheduler.num_evicted_pages,
            "faults": engine.num_faults,
            "requests_blamed": engine.num_requests_blamed,
            "shrinks": engine.num_shrinks,
            "repairs": engine.num_repairs,
            "prefill_tokens": meter.tokens[PREFILL],
            "decode_tokens": meter.tokens[DECODE],
            "prefill_begun": meter.num_begun[PREFILL],
            "decode_begun": meter.num_begun[DECODE],
            "prefill_failed": meter.num_failed[PREFILL],
            "decode_failed": meter.num_failed[DECODE],
            "late_compilations": num_late(),
        },
        steps={kind: list(counts) for kind, counts in meter.durations.items()},
        step_seconds=dict(meter.seconds),
        batch_sizes=list(meter.batch_sizes),
        batch_size_sum=meter.batch_size_sum,
        joined_by=dict(counters.joined_by),
        error=None if engine.error is None else engine.error.message,
        step_limit_s=meter.limit_s(),
        is_compiling=meter.is_compiling(),
        checking_s=meter.checking_s(),
    )
