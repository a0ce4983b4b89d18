"""Host time of scheduling: microseconds per decoding row and step, without any device.

    python bench/host_overhead.py [--json] [--engine] [--rows 8 64 256 1024] [--queued 10000]

Every case decodes 512-token contexts with one step of look-ahead. Results are made up in advance, so what is timed is
`Scheduler.plan` and `Scheduler.complete` alone; `--engine` times a whole turn of the driver instead, from the inbox to
the delivery of events. The clock is this thread's processor time, so that other work on the machine does not count.
"""

import argparse
import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Callable

from quire.core.limits import Limits
from quire.core.plan import Kind, StepPlan, StepResult
from quire.core.scheduler import Scheduler
from quire.engine.driver import MAX_COMMANDS_PER_TURN, Driver, Phase
from quire.engine.engine import Engine
from quire.ipc.messages import Progress, Submit
from quire.request import Request

PAGE_SIZE = 16
CONTEXT = 512
TOKEN = 7
WARM_UP_STEPS = 20


def limits(rows: int, steps: int) -> Limits:
    tokens = CONTEXT + steps
    return Limits(
        page_size=PAGE_SIZE,
        num_pages=(rows + 1) * (-(-tokens // PAGE_SIZE) + 1) + 1,
        max_batch_size=rows,
        max_step_tokens=max(8192, rows),
        max_batch_prefill_tokens=8192,
        max_sequence_tokens=tokens,
    )


def request(request_id: int, number: int, max_tokens: int) -> Request:
    """Prompts differ from the first token on: nothing is shared, as among strangers."""
    return Request(request_id, (number, *range(1, CONTEXT)), max_tokens, end_ids=(2,))


def made_up(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, [[TOKEN] for chunk in plan.chunks if chunk.samples])


class MadeUp:
    """An executor that answers at once; what it costs itself is taken off."""

    platform, num_late, num_padding_tokens, num_unfinished = "cpu", 0, 0, 0

    def __init__(self) -> None:
        self.spent_s = 0.0

    def submit(self, plan: StepPlan) -> "Answer":
        begun = time.thread_time()
        answer = Answer(made_up(plan))
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


def time_scheduler(rows: int, queued: int, steps: int) -> list[float]:
    """Seconds of each step of `rows` decoding rows."""
    total_steps = steps + 2 * WARM_UP_STEPS + 2 * rows * CONTEXT // 8192
    scheduler = Scheduler(limits(rows, total_steps), time.monotonic)
    for number in range(rows + queued):
        scheduler.add(request(number, number, total_steps))
    in_flight: deque[StepPlan] = deque()

    def turn() -> tuple[float, int]:
        begun = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) == 1:
            return planned - begun, 0
        result = made_up(in_flight.popleft())
        resumed = time.thread_time()
        scheduler.complete(result)
        return planned - begun + time.thread_time() - resumed, sum(c.kind is Kind.DECODE for c in plan.chunks)

    return _steady(turn, rows, steps)


def time_driver(rows: int, queued: int, steps: int) -> list[float]:
    """Seconds of each of the driver's turns, on this thread."""
    turns_to_take_in = (rows + queued) // MAX_COMMANDS_PER_TURN + 1
    total_steps = steps + 2 * WARM_UP_STEPS + 2 * rows * CONTEXT // 8192 + turns_to_take_in
    executor = MadeUp()
    scheduler = Scheduler(limits(rows, total_steps), time.monotonic)
    driver = Driver(Engine(scheduler, executor, lookahead=1))
    driver._phase = Phase.RUNNING  # without its thread: the turns are taken here
    delivered: deque[int] = deque()
    port = driver.open(
        lambda events: delivered.append(sum(len(one.updates) for one in events if isinstance(one, Progress)))
    )
    for number in range(rows + queued):
        port.send(Submit(request(port.request_id(number), number, total_steps)))

    for _ in range(turns_to_take_in):
        driver._turn()
    delivered.clear()

    def turn() -> tuple[float, int]:
        executor.spent_s = 0.0
        begun = time.thread_time()
        driver._turn()
        return time.thread_time() - begun - executor.spent_s, delivered.popleft() if delivered else 0

    return _steady(turn, rows, steps)


def _steady(turn: Callable[[], tuple[float, int]], rows: int, steps: int) -> list[float]:
    """The times of `steps` turns, from when every row decodes."""
    while turn()[1] < rows:
        pass
    for _ in range(WARM_UP_STEPS):
        turn()
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        seconds, decoded = turn()
        assert decoded == rows, f"{decoded} of {rows} rows decoded"
        times.append(seconds)
    gc.unfreeze()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--engine", action="store_true", help="time the driver's turns: scheduler, engine and events")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--queued", type=int, default=10_000, help="requests that wait in the second half of the cases")
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    measure = time_driver if asked.engine else time_scheduler
    cases = []
    for queued in (0, asked.queued):
        for rows in asked.rows:
            times = measure(rows, queued, asked.steps)
            per_row = [seconds / rows * 1e6 for seconds in times]
            cases.append(
                {
                    "rows": rows,
                    "queued": queued,
                    "median_us_per_row": round(statistics.median(per_row), 3),
                    "mean_us_per_row": round(statistics.fmean(per_row), 3),
                    "max_ms_per_step": round(max(times) * 1e3, 3),
                }
            )
    if asked.json:
        print(json.dumps({"what": "driver" if asked.engine else "scheduler", "steps": asked.steps, "cases": cases}))
        return
    print(f"{'rows':>6} {'queued':>7} {'us/row (median)':>16} {'us/row (mean)':>14} {'worst step ms':>14} {'ratio':>6}")
    for case in cases:
        ratio = case["median_us_per_row"] / cases[0]["median_us_per_row"]
        print(
            f"{case['rows']:>6} {case['queued']:>7} {case['median_us_per_row']:>16.2f} {case['mean_us_per_row']:>14.2f}"
            f" {case['max_ms_per_step']:>14.2f} {ratio:>6.2f}"
        )


if __name__ == "__main__":
    main()
