"""Runs of sets: a set that fails is made smaller, and the line is shown from which it can be run again."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable

from tests.crossings.bench import Bench
from tests.crossings.capability import Capability, Layout
from tests.crossings.covering import PLAIN, with_needs
from tests.crossings.crossing import Crossing

MOST_TRIES = 400  # to make a set smaller
OTHER_SEEDS = 10  # that each smaller set is tried with

MakeBench = Callable[[], Bench]


def run_sets(
    make: MakeBench, sets: Iterable[tuple[list[Capability], int]], name: str = "fake", most_tries: int = MOST_TRIES
) -> Counter[str]:
    """Cross each set with its seed. Returns what happened; raises for the first set that fails."""
    happened: Counter[str] = Counter()
    for capabilities, seed in sets:
        crossing, error = run_set(make, capabilities, seed)
        happened += crossing.happened
        if error is not None:
            smaller, its_seed, error = smallest(make, capabilities, seed, error, most_tries)
            raise AssertionError(
                f"{' x '.join(one.name for one in smaller)}: {error!r}\n"
                f"run it again: {line_of(smaller, its_seed, name)}\n"
                f"the set was: {line_of(capabilities, seed, name)}"
            ) from error
    return happened


def run_set(make: MakeBench, capabilities: list[Capability], seed: int) -> tuple[Crossing, Exception | None]:
    bench = make()
    try:
        crossing = Crossing(bench, capabilities, seed)
        crossing.run()
        return crossing, None
    except Exception as error:
        return crossing, error
    finally:
        bench.close()


def smallest(
    make: MakeBench, capabilities: list[Capability], seed: int, error: Exception, most_tries: int = MOST_TRIES
) -> tuple[list[Capability], int, Exception]:
    """The fewest of these that fail, a pair where that is possible: each is left out in turn, until none can be."""
    tries, place = 0, 0
    while place < len(capabilities) and tries < most_tries:
        left_out = capabilities[place]
        names = [one.name for one in capabilities if one is not left_out and left_out.name not in one.needs]
        place += 1
        if not names or (isinstance(left_out, Layout) and left_out.name == PLAIN):
            continue
        for its_seed in (seed, *range(OTHER_SEEDS)):
            tries += 1
            found = run_set(make, with_needs(names), its_seed)[1]
            if found is not None:
                capabilities, seed, error, place = with_needs(names), its_seed, found, 0
                break
    return capabilities, seed, error


def line_of(capabilities: list[Capability], seed: int, name: str) -> str:
    return shlex.join(
        ["python", "-m", "tests.crossings", "--bench", name, "--seed", str(seed), *(one.name for one in capabilities)]
    )
