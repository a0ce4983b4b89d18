"""Second turns from host memory, under several rules by turns in one engine.

    python bench/restore_variants.py --model random:llama-3.1-8b --talks 24 --tokens 4000 --resident 4 \\
        --host-cache-gib 20 --max-batch-prefill-tokens 4096 --few-programs          # on a GPU
    python bench/restore_variants.py … --only "as it is"        # some of them, or one for environment variables

Each variant has the second turns of `host_cache.py`, alone and beside a stream. Three lines for each: the figures; when
the calls of the host began and ended in a restored turn alone, in milliseconds since the request came, with the moments
at which copies and pages were there; and what the host took for a step of the stream that restores, call by call, and
for one that does not. Medians.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any
from unittest.mock import patch

import jax
from host_cache import GREEDY, QUIET_STEPS, STREAM, StepTimes, Turn, add_options, build, turn_of

from quire.core.plan import Kind, Tier
from quire.engine.building.built import Built
from quire.engine.limits import restore_pace
from quire.executor.host import block_saves, pinned_pages
from quire.request import Request

ARRIVALS = ("copies there", "in place")  # moments


class Marks:
    """Calls of the host, by name, since the last `begin`: when those of the first step began and ended, and how long
    those of all steps took together."""

    def __init__(self, built: Built) -> None:
        engine, executor = built.engine, built.executor
        self.begun_s = 0.0
        self.spans: dict[str, tuple[float, float]] = {}
        self.sums: dict[str, float] = {}
        self.turns: list[dict[str, tuple[float, float]]] = []  # those that are kept
        self.steps: dict[str, list[dict[str, float]]] = {"restore": [], "decode alone": []}
        self._before: dict[str, float] = {}  # of a step, the sums before it
        self._completed_s = 0.0
        for owner, name, shown in (
            (engine.scheduler, "plan", "plan"), (engine.scheduler, "complete", "complete"),
            (executor.host_pages, "fetch", "fetch"), (executor.host_pages, "save", "save"),
            (executor.host_pages, "begin_saves", "begin saves"), (executor._copies, "settle", "place"),
            (executor, "_begin_slots", "begin slots"), (executor, "_forward", "compute prompts"),
            (executor, "_decode", "decode"), (engine._steps, "collect", "wait"), (executor, "submit", "submit"),
        ):  # fmt: skip
            self._time(owner, name, shown)

    def begin(self) -> None:
        self.spans, self.sums, self.begun_s = {}, {}, time.monotonic()

    def add(self, name: str, begun_s: float, ended_s: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + ended_s - begun_s
        if name not in self.spans or "submit" not in self.spans or name in ARRIVALS:
            self.spans[name] = self.spans.get(name, (begun_s - self.begun_s, 0.0))[0], ended_s - self.begun_s

    def _time(self, owner: Any, name: str, shown: str) -> None:
        method = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            begun_s = time.monotonic()
            if shown == "plan":
                self._before = dict(self.sums)
            result = method(*given, **named)
            ended_s = time.monotonic()
            self.add(shown, begun_s, ended_s)
            if shown == "fetch":
                self._note_arrival(ARRIVALS[0], [one.contents for one in result])
            elif shown == "place" and result[1]:
                self._note_arrival(ARRIVALS[1], [one._number for one in result[1]])
            elif shown == "complete":
                self._completed_s = ended_s - begun_s
            elif shown == "submit":
                self._end_step(given[0])
            return result

        setattr(owner, name, call)

    def _note_arrival(self, name: str, arrays: Any) -> None:
        def wait() -> None:
            jax.block_until_ready(arrays)
            now_s = time.monotonic()
            self.add(name, now_s, now_s)

        Thread(target=wait, daemon=True).start()

    def _end_step(self, plan: Any) -> None:
        """The calls of the host for one step, with the completion of the step before it."""
        if not plan.chunks or any(chunk.kind is not Kind.DECODE for chunk in plan.chunks):
            return
        restores = any(copy.source.tier is Tier.HOST for copy in plan.copies)
        if plan.copies and not restores:
            return
        sums = {name: total - self._before.get(name, 0.0) for name, total in self.sums.items()}
        calls = {name: sums[name] for name in ("plan", "fetch", "save", "begin saves", "place", "decode", "submit")
                 if sums.get(name)}  # fmt: skip
        self.steps["restore" if restores else "decode alone"].append({"complete": self._completed_s, **calls})

    def show(self) -> None:
        def begun_s(name: str) -> float:
            return statistics.median(one[name][0] for one in self.turns if name in one)

        names = sorted({name for turn in self.turns for name in turn if name != "decode"}, key=begun_s)
        parts = []
        for name in names:
            first, last = (
                1000 * statistics.median(one[name][at] for one in self.turns if name in one) for at in (0, 1)
            )
            parts.append(f"{name} {first:.1f}" + (f" to {last:.1f}" if last > first else ""))
        print("  a restored turn alone: " + ", ".join(parts))
        for kind, steps in self.steps.items():
            names = list(dict.fromkeys(name for step in steps for name in step))
            medians = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
            # All that is launched is in `submit`.
            total = statistics.median(
                sum(step.get(name, 0.0) for name in ("complete", "plan", "submit")) for step in steps
            ) if steps else 0.0  # fmt: skip
            calls = ", ".join(f"{name} {1000 * took:.2f}" for name, took in medians.items())
            print(f"  host, steps that {kind} ({len(steps)}): {1000 * total:.2f} ms: {calls}", flush=True)
        self.turns.clear()
        for steps in self.steps.values():
            steps.clear()


def second_turns(
    built: Built, marks: Marks, prompts: list[tuple[int, ...]], first_id: int, length: int
) -> tuple[list[Turn], list[Turn]]:
    """Those restored and those computed; beside a stream of `length` tokens, if there is one."""
    engine, restored, computed = built.engine, [], []
    for number, prompt in enumerate(prompts):
        if length and not engine.scheduler.has(STREAM):
            engine.add(Request(STREAM, (1, 2, 3), length, GREEDY, ignore_end=True))
            for _ in range(8):
                engine.step()
        salt = f"hidden {first_id}" if number % 2 else ""
        marks.begin()
        turn = turn_of(engine, Request(first_id + number, (*prompt, 5, 6, 7), 2, GREEDY, salt=salt))
        if salt:
            computed.append(turn)
        elif turn.cached_tokens > len(prompt) * 0.9:
            restored.append(turn)
            if not length:
                time.sleep(0.01)  # for the threads that note arrivals
                marks.turns.append(marks.spans)
    return restored, computed


def median_ms(turns: list[Turn]) -> float:
    return 1000 * statistics.median(turn.first_s for turn in turns) if turns else float("nan")


def run_variant(
    name: str, built: Built, marks: Marks, prompts: list[tuple[int, ...]], first_id: int, length: int
) -> None:
    engine, times = built.engine, StepTimes()
    alone = [median_ms(turns) for turns in second_turns(built, marks, prompts, first_id, 0)]
    engine.add(Request(STREAM, (1, 2, 3), length, GREEDY, ignore_end=True))
    for number in range(QUIET_STEPS):
        if number == QUIET_STEPS // 4:
            engine.observe(times)
            times.is_quiet = True
        engine.step()
    times.is_quiet = False
    for steps in marks.steps.values():
        steps.clear()
    restored, computed = second_turns(built, marks, prompts, first_id + 1000, length)
    engine.abort(STREAM)
    while not engine.is_idle:
        engine.step()
    engine.observers.detach(times)
    beside = [median_ms(restored), median_ms(computed)]
    pause = 1000 * statistics.median(max(turn.pauses_s, default=0.0) for turn in restored) if restored else 0.0
    quiet = 1000 * statistics.median(times.quiet)
    copying = [("restores", times.copying["restore"]), ("saves", times.copying["only save"])]
    steps = [f"one that begins no copies {1000 * statistics.median(times.alone):.2f}"] if times.alone else []
    for what, found in copying:
        if found:
            took, pages, saved = (statistics.mean(column) for column in zip(*found, strict=True))
            ms = 1000 * statistics.median(one[0] for one in found)
            steps.append(f"{what} {ms:.2f} = {100 * (ms / quiet - 1):+.0f} % (mean {1000 * took:.2f}; {len(found)} "
                         f"steps, {pages:.0f} pages from the host, {saved:.0f} to it)")  # fmt: skip
    print(f"{name}: first token alone {alone[0]:.1f} of {alone[1]:.1f} ms, {alone[1] / alone[0]:.2f}x; beside a stream "
          f"{beside[0]:.1f} of {beside[1]:.1f} ms, {beside[1] / beside[0]:.2f}x, longest pause {pause:.1f} ms; a step "
          f"of the stream {quiet:.2f}, {', '.join(steps)}", flush=True)  # fmt: skip
    marks.show()


@contextmanager
def saves_at_once(built: Built) -> Iterator[None]:
    """Blocks go to the host in steps that fetch others too, and have half the room."""
    host = built.executor.host_pages
    begin = host.begin_saves
    host.begin_saves = lambda num_tokens, has_decodes, fetches=False: begin(num_tokens, has_decodes)
    with patch.object(block_saves, "MAX_SAVING_BYTES", 512 * 2**20):
        yield
    host.begin_saves = begin


@contextmanager
def with_lookahead(built: Built, steps: int) -> Iterator[None]:
    before, built.engine._lookahead = built.engine._lookahead, steps
    yield
    built.engine._lookahead = before


@contextmanager
def with_pages(built: Built, count: int) -> Iterator[None]:
    """Steps of others restore so many pages, whatever that takes."""
    budget = built.engine.scheduler.budget

    def allow(pace: Any, _: int) -> None:
        pace._allowed = budget.max_restores_beside_decodes = count

    with patch.object(restore_pace.RestorePace, "_allow", allow):
        budget.max_restores_beside_decodes = count
        yield


def placed_at_once(_: Built) -> Any:
    return patch.object(pinned_pages, "MANY_BYTES", 2**62)


@contextmanager
def as_it_is(_: Built) -> Iterator[None]:
    yield


VARIANTS: dict[str, Callable[[Built], Any]] = {
    "as it is": as_it_is,
    "placed at once": placed_at_once,
    "saves at once": saves_at_once,
    "look-ahead of 2": lambda built: with_lookahead(built, 2),
    "16 pages a step": lambda built: with_pages(built, 16),
    "64 pages a step": lambda built: with_pages(built, 64),
    "128 pages a step": lambda built: with_pages(built, 128),
    "as it is again": as_it_is,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--only", help="variants, by their names with commas between them")
    parser.add_argument("--seconds", type=float, default=85.0, help="no variant begins after so many")
    asked = parser.parse_args()
    names = list(VARIANTS) if asked.only is None else asked.only.split(",")
    if unknown := sorted(set(names) - set(VARIANTS)):
        raise SystemExit(f"--only: {', '.join(unknown)} is none of {', '.join(VARIANTS)}")
    begun_s = time.monotonic()
    built = build(asked)
    print(f"started in {time.monotonic() - begun_s:.0f} s", flush=True)
    chance, vocabulary = random.Random(1), built.deployment.model.vocab_size
    prompts = [tuple(chance.randrange(vocabulary) for _ in range(asked.tokens)) for _ in range(asked.talks)]
    for number, prompt in enumerate(prompts):
        turn_of(built.engine, Request(number, prompt, 2, GREEDY))
    marks = Marks(built)
    second_turns(built, marks, prompts[:4], 900, 0)  # whatever is done for the first time
    second_turns(built, marks, prompts[:4], 950, asked.tokens - 10)
    built.engine.abort(STREAM)
    marks.turns.clear()
    for number, (name, variant) in enumerate(VARIANTS.items()):
        if name not in names or time.monotonic() - begun_s > asked.seconds:
            continue
        try:
            with variant(built):
                run_variant(name, built, marks, prompts, 10_000 * (1 + number), asked.tokens - 10)
        except Exception as error:  # of any kind: the others run all the same
            print(f"{name}: {error!r}", flush=True)
    print(f"{time.monotonic() - begun_s:.0f} s in all")


if __name__ == "__main__":
    main()
