"""Durations and contents of steps."""

from bisect import bisect_left
from collections.abc import Sequence

from quire.engine.engine import Engine
from quire.engine.observer import DECODE, PREFILL, Observer, Step
from quire.engine.work_log import WorkLog
from quire.ipc.messages import BATCH_SIZES, DURATIONS_S, Stats
from quire.ipc.watchdog_timeout import LongestStep

KINDS = (PREFILL, DECODE)
# The host's work on a step: it applies the result, hands out the tokens, plans a step in which sequences join others.
# `inference` is all of a step, from its plan until its tokens are handed out.
HOST_WORK = (*(f"{kind}_{part}" for kind in KINDS for part in ("complete", "deliver", "inference")), "join")


class Meter(Observer):
    """Counts and times steps. Written by the engine thread; other threads read single numbers.

    A step is a prefill if it computes any part of a prompt, as its clients' tokens wait for the prompt then.
    """

    def __init__(self) -> None:
        self.durations = {kind: [0] * (len(DURATIONS_S) + 1) for kind in (*KINDS, *HOST_WORK)}
        self.seconds = dict.fromkeys(self.durations, 0.0)
        self.batch_sizes = [0] * (len(BATCH_SIZES) + 1)
        self.batch_size_sum = 0
        self.tokens = dict.fromkeys(KINDS, 0)
        self.num_launched = dict.fromkeys(KINDS, 0)  # each of them is under way, has a duration, or failed
        self.num_failed = dict.fromkeys(KINDS, 0)
        self._longest_s = 0.0  # of a step that worked
        self._most_tokens = 0  # in a step that worked

    @property
    def longest(self) -> LongestStep:
        return LongestStep(self._longest_s, self._most_tokens)

    def step_launched(self, step: Step) -> None:
        plan = step.plan
        self.tokens[PREFILL] += step.num_prefill_tokens
        self.tokens[DECODE] += step.num_tokens - step.num_prefill_tokens
        if plan.started:
            self.batch_sizes[bisect_left(BATCH_SIZES, len(plan.started))] += 1
            self.batch_size_sum += len(plan.started)
            if plan.num_prefills < len(plan.chunks):
                self._note("join", step.launched_s - step.planned_s)
        self.num_launched[step.kind] += 1

    def step_ended(self, step: Step) -> None:
        if step.error is not None:
            self.num_failed[step.kind] += 1
            return
        self._most_tokens = max(self._most_tokens, step.num_tokens)  # first: others read it once there is a longest
        if not step.waited_for_compiler:
            self._longest_s = max(self._longest_s, step.took_s)
        self._note(step.kind, step.took_s)

    def steps_discarded(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.num_failed[step.kind] += 1

    def detached(self) -> None:
        """No step that it has seen tells how long others may take."""
        self._longest_s = 0.0

    def step_delivered(self, step: Step) -> None:
        self._note(f"{step.kind}_complete", step.completed_s - step.ended_s)
        self._note(f"{step.kind}_deliver", step.delivered_s - step.completed_s)
        self._note(f"{step.kind}_inference", step.delivered_s - step.planned_s)

    def _note(self, what: str, took_s: float) -> None:
        self.durations[what][bisect_left(DURATIONS_S, took_s)] += 1
        self.seconds[what] += took_s


def attach_meter(engine: Engine) -> Meter:
    """A new meter of `engine`, and a log of its work."""
    meter = Meter()
    engine.observe(meter)
    engine.observe(WorkLog(engine.scheduler.stats, engine.scheduler.limits.num_pages - 1, meter.tokens))
    return meter


def read_stats(engine: Engine, meter: Meter, waited_s: float = 0.0) -> Stats:
    """The engine's numbers at this moment. Each is right by itself: the engine thread goes on meanwhile."""
    scheduler = engine.scheduler.stats()
    limits = engine.scheduler.limits
    running_adapters, waiting_adapters = engine.scheduler.adapters.in_use()
    return Stats(
        busy_s=engine.busy_s,
        waited_s=waited_s,
        idle_s=engine.clock() - engine.last_end_s,
        num_running=scheduler.num_running,
        num_slots=limits.max_batch_size,
        num_waiting=scheduler.num_waiting,
        running_max_tokens=scheduler.running_max_tokens,
        free_pages=scheduler.free_pages,
        cached_pages=scheduler.cached_pages,
        num_pages=limits.num_pages - 1,
        max_total_tokens=limits.max_batch_total_tokens or limits.capacity_tokens,
        counters={
            "steps": scheduler.steps,
            "preemptions": scheduler.preemptions,
            "admissions": scheduler.admissions,
            "cached_tokens": scheduler.cached_tokens,
            "evicted_pages": scheduler.evicted_pages,
            "host_pages": scheduler.host_pages,
            "saved_pages": scheduler.saved_pages,
            "saved_bytes": scheduler.saved_pages * limits.host_page_bytes,
            "restored_pages": scheduler.restored_pages,
            "restored_bytes": scheduler.restored_pages * limits.host_page_bytes,
            "lost_pages": scheduler.lost_pages,
            "snapshots": scheduler.snapshots,
            "num_snapshots": limits.snapshots or 0,
            "guesses": scheduler.guesses,
            "right_guesses": scheduler.right_guesses,
            "guessed_chunks": scheduler.guessed_chunks,
            "faults": engine.num_faults,
            "requests_blamed": engine.num_requests_blamed,
            "shrinks": engine.num_shrinks,
            "repairs": engine.num_repairs,
            "late_compilations": engine.executor.num_late,
            "unfinished_programs": engine.executor.num_unfinished,
            "padding_tokens": engine.executor.num_padding_tokens,
            **{f"{kind}_tokens": meter.tokens[kind] for kind in KINDS},
            **{f"{kind}_begun": meter.num_launched[kind] for kind in KINDS},
            **{f"{kind}_failed": meter.num_failed[kind] for kind in KINDS},
            **engine.page_sources.counters(),
        },
        steps={kind: list(counts) for kind, counts in meter.durations.items()},
        step_seconds=dict(meter.seconds),
        batch_sizes=list(meter.batch_sizes),
        batch_size_sum=meter.batch_size_sum,
        joined_by=scheduler.joined_by,
        error=None if engine.error is None else engine.error.message,
        step_limit_s=meter.longest.limit_s(engine.num_step_tokens),
        is_compiling=engine.is_compiling,
        checking_s=engine.checking_s,
        page_size=limits.page_size,
        is_searching=engine.is_searching,
        max_adapters=limits.max_loras,
        running_adapters=running_adapters,
        waiting_adapters=waiting_adapters,
    )
