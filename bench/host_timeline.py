"""Timeline of the host and the device while pages come back from the host.

    python bench/host_timeline.py --model random:llama-3.1-8b --talks 6 --tokens 4000 --host-cache-gib 12 \\
        --max-batch-prefill-tokens 4096     # on a GPU

Second turns as those of `host_cache.py`, under JAX's profiler: first with nothing beside them, then beside a stream
that decodes. For the last restored turn of either, the calls of the host and the work of every stream of the device are
listed in the order in which they began, in milliseconds since the request came. Work of a stream that is of one kind
and follows without a pause is one line. A program's work is named after the program.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from host_cache import GREEDY, STREAM, Calls, add_options, build, show_all, turn_of
from jax.profiler import ProfileData

from quire.engine.building.built import Built
from quire.engine.engine import Engine
from quire.request import Request

TURN = "quire turn"
PAUSE_NS = 100e3  # work of one kind with a longer pause in it is in two lines


class Work(NamedTuple):
    begun_ns: float
    ended_ns: float
    where: str
    what: str
    busy_ns: float
    count: int


def noted(owner: Any, name: str, note: str) -> None:
    """From now on calls of this method are in the profile."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        with jax.profiler.TraceAnnotation(note):
            return method(*given, **named)

    setattr(owner, name, call)


def note_calls(built: Built) -> None:
    engine, executor, copies = built.engine, built.executor, built.executor._copies
    noted(engine.scheduler, "plan", "quire  plan")
    noted(engine.scheduler, "complete", "quire  complete")
    noted(engine._steps, "launch", "quire  launch")
    noted(engine._steps, "collect", "quire  wait")
    noted(copies, "begin", "quire    copies")
    noted(executor, "_begin_slots", "quire    begin slots")
    noted(executor, "_forward", "quire    compute prompts")
    noted(executor, "_decode", "quire    decode")
    noted(executor, "_sample", "quire      sample")
    noted(copies, "settle", "quire      place")
    noted(executor.host_pages, "fetch", "quire      fetch")
    noted(executor.host_pages, "save", "quire      save")


@contextmanager
def profiled() -> Iterator[list[ProfileData]]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    found: list[ProfileData] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
        (path,) = Path(folder).rglob("*.xplane.pb")
        found.append(ProfileData.from_file(str(path)))


def device_work(profile: ProfileData) -> Iterator[Work]:
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                module = dict(event.stats).get("hlo_module")
                what = event.name if "emcpy" in event.name else f"program {module}"
                end = event.start_ns + event.duration_ns
                yield Work(event.start_ns, end, line.name[:28], what, event.duration_ns, 1)


def host_work(profile: ProfileData) -> Iterator[Work]:
    for plane in profile.planes:
        if plane.name.startswith("/host:CPU"):
            for line in plane.lines:
                for event in line.events:
                    if event.name.startswith("quire"):
                        end = event.start_ns + event.duration_ns
                        yield Work(event.start_ns, end, "host", event.name[6:], event.duration_ns, 1)


def joined(work: list[Work]) -> list[Work]:
    """Work of one kind that follows on the same stream, as one."""
    lines: list[Work] = []
    last: dict[str, int] = {}  # by stream, its line
    for one in sorted(work):
        at = last.get(one.where)
        if at is not None and lines[at].what == one.what and one.begun_ns - lines[at].ended_ns < PAUSE_NS:
            before = lines[at]
            busy, count = before.busy_ns + one.busy_ns, before.count + 1
            lines[at] = before._replace(ended_ns=max(before.ended_ns, one.ended_ns), busy_ns=busy, count=count)
        else:
            last[one.where] = len(lines)
            lines.append(one)
    return lines


def report(profile: ProfileData, most: int) -> list[str]:
    host = list(host_work(profile))
    begun = max(one.begun_ns for one in host if one.what == TURN[6:])
    shown = [one for one in host if one.begun_ns > begun] + joined([*device_work(profile)])
    shown = sorted(one for one in shown if one.ended_ns > begun)
    lines = [f"{'from':>8} {'to':>8} {'busy':>8} {'count':>6}  ms"]
    for one in shown[:most]:
        times = (one.begun_ns - begun, one.ended_ns - begun, one.busy_ns)
        numbers = " ".join(f"{time / 1e6:8.2f}" for time in times)
        lines.append(f"{numbers} {one.count:6d}  {one.where:28s} {one.what}")
    return lines


def turns(engine: Engine, prompts: list[tuple[int, ...]], first_id: int, length: int) -> None:
    """Restored and computed by turns, the last one restored; beside a stream of `length` tokens, if there is one."""
    for number, prompt in enumerate(prompts):
        if length and not engine.scheduler.has(STREAM):
            engine.add(Request(STREAM, (1, 2, 3), length, GREEDY, ignore_end=True))
            for _ in range(8):
                engine.step()
        salt = f"hidden {first_id}" if (len(prompts) - number) % 2 == 0 else ""
        with jax.profiler.TraceAnnotation(TURN):
            turn = turn_of(engine, Request(first_id + number, (*prompt, 5, 6, 7), 2, GREEDY, salt=salt))
        print(f"{turn.cached_tokens} tokens cached, first token after {turn.first_s * 1000:.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--talks", type=int, default=6)
    parser.add_argument("--figures", action="store_true", help="also those of host_cache.py, before it")
    parser.add_argument("--lines", type=int, default=120, help="so many are shown of either")
    asked = parser.parse_args()
    begun_s = time.monotonic()
    built = build(asked)
    engine, chance = built.engine, random.Random(1)
    vocabulary = built.deployment.model.vocab_size
    prompts = [tuple(chance.randrange(vocabulary) for _ in range(asked.tokens)) for _ in range(asked.talks)]
    print(f"started in {time.monotonic() - begun_s:.0f} s; {type(built.executor.host_pages).__name__}", flush=True)
    for number, prompt in enumerate(prompts):
        turn_of(engine, Request(number, prompt, 2, GREEDY))
    if asked.figures:
        calls = Calls(built)
        show_all(engine, prompts, asked.tokens - 10)
        calls.show()
    else:
        turns(engine, prompts, 900, 0)
    note_calls(built)
    for first_id, length in ((6000, 0), (7000, asked.tokens - 10)):
        turns(engine, prompts[:2], first_id + 500, length)
        with profiled() as found:
            turns(engine, prompts[2:5], first_id, length)
        print("beside a stream" if length else "alone", *report(found[0], asked.lines), sep="\n", flush=True)
    print(f"{time.monotonic() - begun_s:.0f} s in all")


if __name__ == "__main__":
    main()
