"""Host time of planning steps that bring pages back from the host, without any device.

    python bench/restore_planning.py [--talks 64] [--tokens 4000] [--rounds 3] [--profile]

The core alone, with the numbers of a model of 8B on a GPU: conversations of `tokens` tokens in pages of 32, of which
the device has pages for four. Then each has a second turn, of which every second one has its host pages hidden, so that
what is evicted has to be saved. First with nothing beside it, where one step restores all; then beside a stream, where
each step restores `--beside` pages. Results are made up. The clock is this thread's processor time; medians of steps.
"""

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import time
from collections import deque
from typing import NamedTuple

from quire.core.limits import Limits
from quire.core.plan import StepPlan, StepResult, Tier
from quire.core.scheduler import Scheduler
from quire.engine.garbage_collection import THRESHOLDS
from quire.request import Request, SamplingParams

PAGE_SIZE = 32
RESIDENT = 4
STREAM = 1_000_000
TOKEN = 7
MANY = 40  # pages
GREEDY = SamplingParams(temperature=0)


class Planned(NamedTuple):
    """A step and the milliseconds of its plan and its completion."""

    plan_ms: float
    complete_ms: float
    num_restored: int
    num_saved: int


class Turns:
    """Runs requests on a scheduler, with one step of look-ahead, and times every step."""

    def __init__(self, limits: Limits, profile: cProfile.Profile | None) -> None:
        self.scheduler = Scheduler(limits, time.monotonic)
        self.steps: list[Planned] = []
        self._profile = profile
        self._in_flight: deque[tuple[StepPlan, float]] = deque()

    def run(self, request: Request) -> None:
        """Until it has ended."""
        self.scheduler.add(request)
        while self.scheduler.has(request.request_id):
            self.step()

    def step(self) -> None:
        while len(self._in_flight) < 2:
            begun_s = time.thread_time()
            if self._profile is not None:
                self._profile.enable()
            plan = self.scheduler.plan()
            if self._profile is not None:
                self._profile.disable()
            took_s = time.thread_time() - begun_s
            if plan is None:
                break
            self._in_flight.append((plan, took_s))
        plan, planned_s = self._in_flight.popleft()
        result = StepResult(plan.step, [[TOKEN] for chunk in plan.chunks if chunk.samples])
        begun_s = time.thread_time()
        self.scheduler.complete(result)
        took_s = time.thread_time() - begun_s
        restored = sum(copy.source.tier is Tier.HOST for copy in plan.copies)
        saved = sum(copy.target.tier is Tier.HOST for copy in plan.copies)
        self.steps.append(Planned(1000 * planned_s, 1000 * took_s, restored, saved))

    def show(self, name: str) -> None:
        """The steps since the last call that restored or computed many pages."""
        for what, saves_alone in (("restores", False), ("computes a prompt", True)):
            many = [one for one in self.steps if (one.num_saved if saves_alone else one.num_restored) > MANY]
            if found := [one for one in many if not (saves_alone and one.num_restored)]:
                plan, complete, restored, saved = (statistics.median(column) for column in zip(*found, strict=True))
                print(f"{name}, a step that {what}: plan {plan:.3f} ms, complete {complete:.3f} ms "
                      f"({len(found)} steps; {restored:.0f} pages from the host, {saved:.0f} to it)")  # fmt: skip
        self.steps.clear()


def second_turns(turns: Turns, prompts: list[tuple[int, ...]], first_id: int) -> None:
    for number, prompt in enumerate(prompts):
        salt = "" if number % 2 == 0 else f"hidden {first_id}"
        turns.run(Request(first_id + number, (*prompt, 5, 6, 7), 2, GREEDY, salt=salt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--talks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--beside", type=int, default=64, help="pages that a step restores beside a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="the functions that plans spend their time in")
    asked = parser.parse_args()
    needed = -(-(asked.tokens + 64) // PAGE_SIZE)
    limits = Limits(
        page_size=PAGE_SIZE, num_pages=RESIDENT * needed + 1, max_batch_size=4, max_step_tokens=4100,
        max_batch_prefill_tokens=4096, max_sequence_tokens=asked.tokens + 64, host_pages=asked.talks * needed * 4 // 3,
        max_page_saves=384, max_page_restores=128, restores_ahead=True,
    )  # fmt: skip
    profile = cProfile.Profile() if asked.profile else None
    turns = Turns(limits, profile)
    turns.scheduler.budget.max_restores_beside_decodes = asked.beside
    chance = random.Random(1)
    prompts = [tuple(chance.randrange(128_000) for _ in range(asked.tokens)) for _ in range(asked.talks)]
    for number, prompt in enumerate(prompts):
        turns.run(Request(number, prompt, 2, GREEDY))
    gc.set_threshold(*THRESHOLDS)  # as in a server
    gc.collect()
    gc.freeze()
    turns.steps.clear()
    for number in range(asked.rounds):
        second_turns(turns, prompts, 1000 * (1 + number))
    turns.show("alone")
    for number in range(asked.rounds):
        turns.scheduler.add(Request(STREAM + number, (1, 2, 3), asked.tokens - 10, GREEDY, ignore_end=True))
        turns.step()
        second_turns(turns, prompts, 1000 * (11 + number))
        turns.scheduler.abort(STREAM + number)
    turns.show("beside a stream")
    stats = turns.scheduler.stats()
    print(f"{stats.saved_pages} pages to the host, {stats.restored_pages} from it, {stats.lost_pages} lost")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
