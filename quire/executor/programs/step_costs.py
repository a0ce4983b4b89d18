"""The sizes of steps that a device is good at, by the time that programs take.

The libraries' products are uneven: on one GPU 768 tokens of an 8B model take as long as 896, and 448 longer than 512.
"""

import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax

from quire.executor.programs.kinds import Key, Operands, run_on_padding
from quire.executor.programs.ladder import StepShape
from quire.executor.step import State

log = logging.getLogger(__name__)

MEASURED_TOKENS = 2048  # longer steps are not timed: it would take seconds
SLACK = 1.04  # a token may take this much longer than in the best smaller step


class StepCosts:
    """The seconds of steps, by their tokens. Owned by the engine's thread."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: tokens of the steps that prompts are cut for."""
        self._sizes = sizes
        self.seconds: dict[int, float] = {}  # of those that were timed
        self._found: tuple[frozenset[Key], tuple[int, ...]] = frozenset(), ()  # by `sizes_among`, the last time

    def sizes_among(self, keys: frozenset[Key]) -> tuple[int, ...]:
        """The sizes that have programs among these."""
        if keys is not self._found[0]:
            self._found = keys, tuple(size for size in self._sizes if StepShape(size) in keys)
        return self._found[1]

    def next_size(self, made: Container[Key]) -> int | None:
        """A size that has not been timed, and has a program that is `made`."""
        left = (size for size in self._sizes if size <= MEASURED_TOKENS and size not in self.seconds)
        return next((size for size in left if StepShape(size) in made), None)

    def measure(self, size: int, program: Callable[..., Any], state: State, operands: Operands) -> State:
        taken = []
        for _ in range(3):
            begun_s = time.monotonic()
            state = run_on_padding(StepShape(size), program, state, operands)
            jax.block_until_ready(state.slots.history)  # type: ignore[no-untyped-call]
            taken.append(time.monotonic() - begun_s)
        self.seconds[size] = min(taken)
        return state

    def slow_and_good_sizes(self) -> tuple[frozenset[Key], tuple[int, ...]]:
        """The steps that take longer than a larger one, and the sizes that the device is good at."""
        milliseconds = {size: round(1000 * took, 2) for size, took in self.seconds.items()}
        log.debug("ms by tokens of a step: %s", milliseconds)
        slow: frozenset[Key] = frozenset(StepShape(size) for size in slower_than_larger(self.seconds))
        return slow, good_sizes(self.seconds, self._sizes)


def slower_than_larger(seconds: Mapping[int, float]) -> frozenset[int]:
    """The sizes that take no less time than a larger one."""
    return frozenset(
        size for size, took in seconds.items() if any(took >= seconds[other] for other in seconds if other > size)
    )


def good_sizes(seconds: Mapping[int, float], sizes: Sequence[int]) -> tuple[int, ...]:
    """The `sizes` at which a token takes hardly longer than in a smaller step. One that was not timed is as good
    as half of it."""
    good: set[int] = set()
    best = float("inf")  # seconds of a token
    for size in sorted(sizes):
        if size not in seconds:
            if size // 2 in good or size // 2 not in sizes:
                good.add(size)
        elif seconds[size] / size <= SLACK * best:
            good.add(size)
            best = min(best, seconds[size] / size)
    return tuple(sorted(good))
