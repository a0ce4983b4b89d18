"""A driver with everything that one request can do to another, in any order and many times over.

The other crossings have each pair of capabilities, mostly once. Here requests wait for each other in
all runs, with many more events. `QUIRE_HYPOTHESIS_PROFILE=long` makes more runs, by other seeds each time.
"""

import os
import random
from pathlib import Path
from random import Random

from tests.crossings.bench import Bench
from tests.crossings.capability import Capability
from tests.crossings.covering import go_together, with_needs
from tests.crossings.crossing import Crossing
from tests.crossings.fake_bench import FakeBench
from tests.crossings.table import ENTRIES, TABLE

IS_LONG = os.environ.get("QUIRE_HYPOTHESIS_PROFILE") == "long"
RUNS = 2000 if IS_LONG else 40
FIRST = random.randrange(2**32) if IS_LONG else 0
NUM_REQUESTS, MOST_EVENTS = 30, 24
ALWAYS = ("few slots", "adapters", "an adapter is replaced", "timings", "tracing", "priority", "deadline")
# With some of these in each run. What goes with none of those before it is left out.
OTHERS = (
    *("few pages", "host tier", "guesses by lookup", "guesses by draft", "bursts", "two steps ahead", "no look-ahead"),
    *("admission rule", "bounded total", "bounded queue", "no prefix cache", "small chunks", "short steps"),
    *("grammar", "forced tokens", "samples", "log-probabilities", "deadline to start", "stop tokens", "long prompt"),
    *("a launch fails", "a step fails", "memory is short", "a request fails its steps", "a row has no numbers"),
    *("an observer raises", "a front end leaves", "drain", "an adapter is unloaded", "pauses", "requests are aborted"),
    *(one.name for one in ENTRIES if one.fills == "layout" and one.in_fake),
)


class Fuzz(Crossing):
    """Requests are aborted, adapters change and time passes at any moment, again and again."""

    def __init__(self, bench: Bench, capabilities: list[Capability], seed: int) -> None:
        super().__init__(bench, capabilities, seed, NUM_REQUESTS)
        self.chance = Random(f"events {seed}")
        for _ in range(self.chance.randrange(MOST_EVENTS)):
            self.at_some_turn(self.chance.choice([self.abort_one, self.replace_adapter, self._wait]))
        self.chance = Random(f"turns {seed}")

    def _wait(self) -> None:
        """Deadlines pass."""
        self.now += self.chance.choice([0.05, 0.5, 5.0])


def drawn(chance: Random) -> list[Capability]:
    names = list(ALWAYS)
    for name in chance.sample(OTHERS, chance.randrange(4, 16)):
        others = [TABLE[each] for one in names for each in (one, *TABLE[one].needs)]
        wanted = [TABLE[each] for each in (name, *TABLE[name].needs)]
        if all(one is other or go_together(one, other) for one in wanted for other in others):
            names.append(name)
    return with_needs(names)


def test_a_driver_bears_everything_in_any_order(tmp_path: Path) -> None:
    happened = {"answered": 0, "aborted": 0, "preempted": 0, "failed steps": 0, "deadline_exceeded": 0}
    for seed in range(FIRST, FIRST + RUNS):
        capabilities = drawn(Random(f"fuzz {seed}"))
        bench = FakeBench(tmp_path)
        fuzz = Fuzz(bench, capabilities, seed)
        try:
            fuzz.run()
        except Exception as error:
            error.add_note(f"seed {seed}: {[one.name for one in capabilities]}")
            raise
        finally:
            bench.close()
        for what in happened:
            happened[what] += fuzz.happened[what]
    assert all(happened.values()), happened
