"""Host time of scheduling, without any device.

    python bench/core.py [--json] [--only WORD] [--profile]

Results are made up, so what is timed is `Scheduler.plan` and `Scheduler.complete` alone, with one step of look-ahead,
and what a request costs when it comes and when it ends. "driver" is a whole turn of the engine's driver, from the inbox
to the delivery of events. The clock is this thread's processor time, so that other work on the machine does not count;
the garbage collector runs as in a server.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

from quire.core.adapter_slots import AdapterSlots
from quire.core.limits import Limits
from quire.core.plan import Chunk, Kind, StepPlan, StepResult
from quire.core.scheduler import Scheduler
from quire.engine.adapters import LoadedAdapters
from quire.engine.driver import MAX_COMMANDS_PER_TURN, Driver, Phase
from quire.engine.engine import Engine
from quire.engine.garbage_collection import THRESHOLDS
from quire.ipc.messages import Progress, Submit
from quire.request import Request

PAGE_SIZE = 16
CONTEXT = 512
STEP_TOKENS = 8192
WARM_UP_STEPS = 20
STEPS = 100
TOKEN = 7
COPIED = 64  # tokens that answers repeat, where guesses are looked up


class Figure(NamedTuple):
    case: str
    size: int
    what: str
    value: float
    unit: str
    limit: float | None = None  # the value that it must not exceed

    def __str__(self) -> str:
        bound = "" if self.limit is None else f"{'at most' if self.value <= self.limit else 'OVER'} {self.limit:g}"
        return f"{self.case:<28} {self.size:>7}  {self.what:<26} {self.value:>9.3f} {self.unit:<4} {bound}"


class Loop:
    """A scheduler and the answers that it gets, with one step of look-ahead."""

    def __init__(self, limits: Limits, token: Callable[[Chunk, int], int] = lambda chunk, number: TOKEN) -> None:
        self.scheduler = Scheduler(limits, time.monotonic)
        self.num_decodes = 0  # of the last step
        self._token = token
        self._in_flight: deque[StepPlan] = deque()

    def turn(self) -> tuple[float, float]:
        """The seconds of one plan and of one completion."""
        begun = time.thread_time()
        plan = self.scheduler.plan()
        planned_s = time.thread_time() - begun
        if plan is not None:
            self._in_flight.append(plan)
            self.num_decodes = len(plan.chunks) - plan.num_prefills
        if plan is not None and len(self._in_flight) == 1:
            return planned_s, 0.0
        oldest = self._in_flight.popleft()
        tokens = [self._tokens(chunk) for chunk in oldest.chunks if chunk.samples]
        begun = time.thread_time()
        self.scheduler.complete(StepResult(oldest.step, tokens))
        return planned_s, time.thread_time() - begun

    def _tokens(self, chunk: Chunk) -> list[int]:
        """Every second guess is wrong."""
        count = 1 + (chunk.length - 1) // 2 if chunk.kind is Kind.VERIFY else 1
        return [self._token(chunk, number) for number in range(count)]

    def steady(self, rows: int, steps: int = STEPS) -> list[tuple[float, float]]:
        """The turns after every row has begun to decode."""
        while self.num_decodes < rows:
            self.turn()
        for _ in range(WARM_UP_STEPS):
            self.turn()
        with frozen():
            return [self.turn() for _ in range(steps)]


@contextmanager
def frozen() -> Iterator[None]:
    """The garbage collector leaves alone what there is, as it does in a server that is ready."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def limits(rows: int, context: int = CONTEXT, **changes: object) -> Limits:
    tokens = context + 2 * WARM_UP_STEPS + 10 * STEPS + 4 * rows * CONTEXT // STEP_TOKENS
    given: dict[str, object] = {
        "page_size": PAGE_SIZE,
        "num_pages": (rows + 1) * (-(-tokens // PAGE_SIZE) + 1) + 1,
        "max_batch_size": rows,
        "max_step_tokens": max(STEP_TOKENS, 2 * rows),
        "max_batch_prefill_tokens": STEP_TOKENS,
        "max_sequence_tokens": tokens,
    }
    return Limits(**(given | changes))


def stranger(number: int, most: int, length: int = CONTEXT) -> Request:
    """Prompts differ from the first token on: nothing is shared."""
    return Request(number, (number % 2**31, *range(1, length)), most, end_ids=(2,))


def decodes(rows: int, limit_ms: float | None = None) -> Iterator[Figure]:
    """Every row decodes."""
    chosen = limits(rows)
    loop = Loop(chosen)
    for number in range(rows):
        loop.scheduler.add(stranger(number, chosen.max_sequence_tokens - CONTEXT))
    times = [plan_s + complete_s for plan_s, complete_s in loop.steady(rows)]
    yield Figure("decodes", rows, "plan + complete", 1e3 * statistics.median(times), "ms", limit_ms)
    yield Figure("decodes", rows, "slowest", 1e3 * max(times), "ms")


def queue(queued: int, limit_ms: float | None = None) -> Iterator[Figure]:
    """Eight rows decode in all slots; the others wait, half of them as long as pages are short."""
    rows, length = 8, 1250
    chosen = limits(rows, length, max_queued=2 * queued)
    loop = Loop(chosen)
    for number in range(rows):
        loop.scheduler.add(stranger(number, chosen.max_sequence_tokens - length, length))
    loop.steady(rows, 1)
    waiting = [stranger(rows + number, 8, length) for number in range(queued)]
    tracemalloc.start()
    before, begun = tracemalloc.get_traced_memory()[0], time.thread_time()
    for request in waiting[: queued // 10]:
        loop.scheduler.add(request)
    kept = (tracemalloc.get_traced_memory()[0] - before) / (queued // 10)
    tracemalloc.stop()
    with frozen():
        begun = time.thread_time()
        for request in waiting[queued // 10 :]:
            loop.scheduler.add(request)
        arrival_s = (time.thread_time() - begun) / (queued - queued // 10)
    yield Figure("a queue", queued, "memory of a request", kept / 1e3, "kB")
    yield Figure("a queue", queued, "arrival", 1e6 * arrival_s, "µs")
    plans = [plan_s for plan_s, _ in loop.steady(rows)]
    yield Figure("a queue", queued, "plan", 1e3 * statistics.median(plans), "ms", limit_ms)
    yield Figure("a queue", queued, "slowest plan", 1e3 * max(plans), "ms")


def guesses(rows: int, repeats: bool) -> Iterator[Figure]:
    """Guesses are looked up: in text that repeats nothing, and in text that repeats itself."""
    chosen = limits(rows, max_guesses=7, looks_up=True)
    counts = [0] * rows

    def token(chunk: Chunk, number: int) -> int:
        at = counts[chunk.request_id]
        counts[chunk.request_id] = at + 1
        return _token(chunk.request_id, at % COPIED + at // (8 * COPIED) * COPIED if repeats else at)

    loop = Loop(chosen, token)
    loop.scheduler.budget.fixed_tokens = 256.0
    loop.scheduler.budget.padded_sizes = tuple(2**power for power in range(3, 14))
    for number in range(rows):
        prompt = tuple(_token(number, -at) for at in range(1, CONTEXT + 1))
        loop.scheduler.add(Request(number, prompt, chosen.max_sequence_tokens - CONTEXT))
    while loop.num_decodes < rows:
        loop.turn()
    with frozen():
        begins = [sum(loop.turn()) for _ in range(2 * WARM_UP_STEPS)]
        times = [sum(loop.turn()) for _ in range(STEPS)]
    case = "guesses looked up, copies" if repeats else "guesses looked up, no copies"
    yield Figure(case, rows, "plan + complete", 1e3 * statistics.median(times), "ms")
    yield Figure(case, rows, "a row", 1e6 * statistics.median(times) / rows, "µs")
    yield Figure(case, rows, "slowest at their beginning", 1e3 * max(begins), "ms")


def _token(request_id: int, at: int) -> int:
    """A token that no other position of a request is likely to have."""
    return (request_id * 7919 + at * 48_271) % 99_991


def one_prefix(waiting: int) -> Iterator[Figure]:
    """Requests with one prompt of 8,000 tokens and a word of their own, which is computed 256 tokens at a time."""
    length = 8000
    pages = (length // PAGE_SIZE + 4) * 4 + 4 * waiting
    chosen = limits(2048, num_pages=pages, max_batch_prefill_tokens=256, max_sequence_tokens=length + 64)
    loop = Loop(chosen)
    prefix = tuple(range(1000, 1000 + length))
    begun = time.thread_time()
    with frozen():
        for number in range(waiting):
            loop.scheduler.add(Request(number, (*prefix, number), 4))
        times = []
        while loop.scheduler.num_requests:
            times.append(loop.turn())
    taken = time.thread_time() - begun
    prompt = times[: length // 256]
    yield Figure("waiting for one prefix", waiting, "plan", 1e3 * statistics.median([one[0] for one in prompt]), "ms")
    yield Figure("waiting for one prefix", waiting, "slowest plan", 1e3 * max(one[0] for one in prompt), "ms")
    yield Figure(
        "waiting for one prefix", waiting, "complete", 1e3 * statistics.median([one[1] for one in prompt]), "ms"
    )
    yield Figure("waiting for one prefix", waiting, "all requests", taken, "s")


class MadeUp:
    """An executor that answers at once; what it costs itself is taken off."""

    platform, num_late, num_padding_tokens, num_unfinished = "cpu", 0, 0, 0

    def __init__(self) -> None:
        self.spent_s = 0.0

    def submit(self, plan: StepPlan) -> "Answer":
        begun = time.thread_time()
        answer = Answer(StepResult(plan.step, [[TOKEN] for chunk in plan.chunks if chunk.samples]))
        self.spent_s += time.thread_time() - begun
        return answer

    def reset(self) -> None:
        raise AssertionError("nothing fails here")

    def check_device(self) -> None: ...


class Answer:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


def driver(rows: int) -> Iterator[Figure]:
    """Every row decodes, and its tokens are delivered to a front end."""
    chosen, executor = limits(rows), MadeUp()
    turns = Driver(Engine(Scheduler(chosen, time.monotonic), executor, lookahead=1))
    turns._phase = Phase.RUNNING  # without its thread: the turns are taken here
    delivered: deque[int] = deque()
    port = turns.open(
        lambda events: delivered.append(sum(len(event.updates) for event in events if isinstance(event, Progress)))
    )
    for number in range(rows):
        port.send(Submit(stranger(port.request_id(number), chosen.max_sequence_tokens - CONTEXT)))
    for _ in range(rows // MAX_COMMANDS_PER_TURN + 1):
        turns._turn()
    while not delivered or delivered[-1] < rows:
        turns._turn()
    times = []
    with frozen():
        for _ in range(STEPS):
            executor.spent_s, begun = 0.0, time.thread_time()
            turns._turn()
            times.append(time.thread_time() - begun - executor.spent_s)
    yield Figure("driver, all decode", rows, "turn", 1e3 * statistics.median(times), "ms")


class NoExecutor:
    """Takes adapters, and forgets them."""

    def add_adapter(self, number: int, arrays: object) -> None: ...

    def drop_adapter(self, number: int) -> None: ...

    def adapter_digest(self, arrays: object) -> str:
        return ""


def adapters(count: int) -> Iterator[Figure]:
    """The cost of a request's end with `count` adapters loaded."""
    slots = AdapterSlots(8)
    loaded = LoadedAdapters(slots, NoExecutor, lambda folder: None)
    for number in range(count):
        read: Future[object] = loaded.begin_load(f"adapter {number}", "folder")
        read.result()
        loaded.end_load(f"adapter {number}", "folder", read)
    begun = time.thread_time()
    for _ in range(STEPS):
        loaded.drop_unused()
    yield Figure("adapters", count, "end of a request", 1e6 * (time.thread_time() - begun) / STEPS, "µs")


CASES: tuple[Callable[[], Iterator[Figure]], ...] = (
    lambda: decodes(8),
    lambda: decodes(64),
    lambda: decodes(256),
    lambda: decodes(1024),
    lambda: decodes(4096, limit_ms=10.0),
    lambda: queue(100_000, limit_ms=0.3),
    lambda: one_prefix(2000),
    lambda: guesses(64, repeats=False),
    lambda: guesses(512, repeats=False),
    lambda: guesses(2048, repeats=False),
    lambda: guesses(64, repeats=True),
    lambda: guesses(2048, repeats=True),
    lambda: adapters(1000),
    lambda: driver(8),
    lambda: driver(1024),
)
NAMES = ("decodes",) * 5 + ("queue", "prefix") + ("guesses",) * 5 + ("adapters",) + ("driver",) * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line in place of a table")
    parser.add_argument(
        "--only", default="", help="only the cases whose names hold this: " + ", ".join(dict.fromkeys(NAMES))
    )
    parser.add_argument("--profile", action="store_true", help="the functions that take the time")
    asked = parser.parse_args()
    gc.set_threshold(*THRESHOLDS)
    profile = cProfile.Profile(time.thread_time) if asked.profile else None
    if profile is not None:
        profile.enable()
    for name, case in zip(NAMES, CASES, strict=True):
        for figure in case() if asked.only in name else ():
            print(json.dumps(figure._asdict()) if asked.json else figure, flush=True)
    if profile is not None:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
