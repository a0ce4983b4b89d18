"""All pairs of capabilities through engines on the fake executor, and larger sets by chance.

`QUIRE_CROSSINGS=20` makes 20 rounds of each, `QUIRE_HYPOTHESIS_PROFILE=long` 100, by other seeds in every run.
"""

import os
import random
from pathlib import Path
from random import Random

import pytest

from tests.crossings.covering import covering_sets, random_set, with_needs
from tests.crossings.crossing import Crossing
from tests.crossings.fake_bench import FakeBench
from tests.crossings.runs import run_sets
from tests.crossings.table import ENTRIES

IS_LONG = os.environ.get("QUIRE_HYPOTHESIS_PROFILE") == "long"
ROUNDS = int(os.environ.get("QUIRE_CROSSINGS", "100" if IS_LONG else "3"))
FIRST = random.randrange(2**32) if IS_LONG else 0
SIZE, LARGE, NUM_LARGE = 8, 18, 12  # capabilities of a set
FAKE = [one for one in ENTRIES if one.in_fake]


@pytest.mark.parametrize("number", range(ROUNDS))
def test_every_pair_goes_together(number: int, tmp_path: Path) -> None:
    chance = Random(FIRST + number)
    sets = [(one, chance.randrange(2**32)) for one in covering_sets(FAKE, SIZE, chance)]
    happened = run_sets(lambda: FakeBench(tmp_path), sets)
    assert happened["answered"] > 5 * len(sets), happened
    for what in (
        "aborted", "deadline_exceeded", "overloaded", "engine_stopped", "generation", "engine ended", "preempted",
        "evicted", "reused", "restored", "guessed", "failed steps",
    ):  # fmt: skip
        assert happened[what], f"{what} never happened"


@pytest.mark.parametrize("number", range(ROUNDS))
def test_many_capabilities_go_together(number: int, tmp_path: Path) -> None:
    chance = Random(FIRST + number)
    sets = [(random_set(FAKE, LARGE, chance), chance.randrange(2**32)) for _ in range(NUM_LARGE)]
    run_sets(lambda: FakeBench(tmp_path), sets)


def test_the_same_set_with_the_same_seed_runs_alike(tmp_path: Path) -> None:
    """Or a failure could not be run again."""
    names = ["few pages", "guesses by draft", "samples", "sampled", "a step fails", "requests are aborted"]
    told = []
    for _ in range(2):
        crossing = Crossing(FakeBench(tmp_path), with_needs(names), seed=3)
        crossing.run()
        told.append(
            [(one.request, one.answers, one.is_aborted) for end in crossing.front_ends for one in end.told.values()]
        )
        plans = crossing.engine.executor.plans
        told.append(plans)
    assert told[0] == told[2]
    assert told[1] == told[3]
