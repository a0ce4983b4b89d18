"""First runs of programs, which take a GPU much longer than the next ones: it loads the program."""

import logging
import time
from collections.abc import Callable
from typing import Any

from quire.executor.programs.padding import Operands, run_on_padding
from quire.executor.programs.row_check import RowCheck
from quire.executor.programs.table import Key
from quire.executor.shapes import Shapes
from quire.executor.step import State

log = logging.getLogger(__name__)

# Of the time of steps, what first runs in their midst may take: of programs that steps have missed for as long, and of
# others.
SHARE, SELDOM_SHARE = 0.1, 0.01


class FirstRuns:
    """The programs that have run. A server runs the others while it is idle; beside requests one is used for the first
    time only when that takes a small share of the time since the last, and a very small one if no steps have missed it.
    Owned by the engine's thread."""

    def __init__(self, shapes: Shapes, clock: Callable[[], float] = time.monotonic) -> None:
        self.done: set[Key] = set()
        self._clock = clock
        self._next_s = self._next_seldom_s = float("-inf")
        self.rows = RowCheck(shapes)

    @property
    def may_be(self) -> bool:
        """True if a step may use a program that has not run, and that steps have missed."""
        return self._clock() >= self._next_s

    def usable(self, keys: frozenset[Key], is_worth: Callable[[Key], bool]) -> frozenset[Key]:
        """The programs that a step may use: those that have run and, when the next first run may be, those that are
        worth one; after a longer time, all."""
        ran = keys & self.done
        if not self.may_be:
            return ran
        return keys if self._clock() >= self._next_seldom_s else ran.union(filter(is_worth, keys - ran))

    def timed(self, key: Key, program: Callable[..., Any]) -> Callable[..., Any]:
        """A program that is about to run for the first time, in a step."""

        def run(*arguments: Any) -> Any:
            begun_s = self._clock()
            result = program(*arguments)
            took_s = self._clock() - begun_s
            log.debug("first run of %s, in a step: launched in %.0f ms", key, 1000 * took_s)
            self.done.add(key)
            # Two programs of one step count as two.
            self._next_s = max(self._next_s, begun_s) + took_s / SHARE
            self._next_seldom_s = max(self._next_seldom_s, begun_s) + took_s / SELDOM_SHARE
            return result

        return run

    def rehearse(self, operands: Operands, program: Callable[..., Any], key: Key, state: State) -> State:
        """Run a program on padding, unless it has run; where rows are to have the same bits in all, check it."""
        is_new = key not in self.done
        self.done.add(key)
        if self.rows.is_due(key):
            return self.rows.run(operands, program, key, state)
        if is_new:
            begun_s = self._clock()
            state = run_on_padding(operands, program, key, state)
            log.debug("first run of %s: launched in %.0f ms", key, 1000 * (self._clock() - begun_s))
        return state
