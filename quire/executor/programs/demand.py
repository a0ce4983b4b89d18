"""The programs that steps missed, by the padding that each would have saved.

As long as a server on a GPU lacks programs, steps run in larger ones. Those missed most are made next. A program that
is made still has its first run before it, which takes a GPU as long as thousands of tokens: beside requests it is
worth that once its absence has cost as much. An idle server runs it in any case.
"""

from collections import defaultdict
from collections.abc import Iterable

from quire.executor.programs.ladder import Ladder, StepShape, weighed
from quire.executor.programs.table import Key, ProgramTable
from quire.executor.sample.sampler import Features

FIRST_RUN_TOKENS = 2048.0  # of padding that a first run in a step has to save: 45 ms of an 8B model on an H200
START_TOKENS = 32.0  # that take as long as to start one more program, or one with branches
SAMPLES_OF_A_TOKEN = 8  # rows of sampling that take as long as a token


class ProgramDemand:
    """Owned by the engine's thread; threads that make programs ask for their `rank`."""

    def __init__(self, ladder: Ladder, keys: Iterable[Key], ways: tuple[str, ...]) -> None:
        """`keys`: all programs, in the order in which they are made as long as none is missed. `ways` of sampling."""
        self._places = {key: place for place, key in enumerate(keys)}
        self._all = ProgramTable(ladder, self._places)
        self._padded_kinds = {"decode", *ways}
        self._missed: defaultdict[Key, float] = defaultdict(float)  # tokens of padding
        self.is_noted = False  # whether it is: on a GPU that serves, until its steps are timed
        self._rows: int | None = None  # of the decodes noted last, if a program of their own was missed

    def rank(self, key: Key) -> tuple[float, int]:
        """The lower, the sooner a program should be made."""
        return -self._missed.get(key, 0.0), self._places.get(key, 0)

    def is_worth_a_first_run(self, key: Key) -> bool:
        """True if a step may run a program for the first time. Those that save more than padding always are."""
        counts = isinstance(key, StepShape) or key[0] in self._padded_kinds
        return not counts or self._missed.get(key, 0.0) >= FIRST_RUN_TOKENS

    def note_forward(self, needed: StepShape, num_tiles: int, chosen: StepShape) -> None:
        """A launch that needs this shape runs in the program `chosen`."""
        if not self.is_noted:
            return
        rows, self._rows = self._rows, None
        if needed.decodes_only and needed.tokens == rows:
            return  # the program that does it all would have saved this one too
        best = self._all.forward(needed, num_tiles)
        if best != chosen:
            self._missed[best] += max(0.0, weighed(chosen) - weighed(best))

    def note_decode(
        self, rows: int, burst: int, most: int, shares: bool, found: tuple[StepShape, Key] | None, table: ProgramTable
    ) -> None:
        """Decodes run in the program `found` of a table, or, where there is none, in two."""
        best = self._all.decode(rows, burst, most, shares) if self.is_noted else None
        if best is None or best == found:
            return
        shape = table.forward(StepShape(rows, decodes_only=True), 0) if found is None else found[0]
        is_other = found is None or found[1][0] != best[1][0]
        self._missed[best[1]] += max(0, shape.tokens - best[0].tokens) + START_TOKENS * is_other
        self._rows = rows if found is None and burst == 1 else None

    def note_verify(self, tokens: int, chosen: tuple[str, int] | None) -> None:
        """So many tokens with guesses run in the program `chosen`, or, where there is none, in three."""
        best = self._all.verify(tokens) if self.is_noted else None
        if best is not None and best != chosen:
            self._missed[best] += 2 * START_TOKENS if chosen is None else max(0, chosen[1] - best[1])

    def note_sample(self, count: int, features: Features, chosen: tuple[str, int]) -> None:
        """`count` tokens are sampled by the program `chosen`."""
        best = self._all.sample(count, features) if self.is_noted else chosen
        if best != chosen:
            padding = max(0, chosen[1] - best[1]) / SAMPLES_OF_A_TOKEN
            self._missed[best] += padding + START_TOKENS * (best[0] != chosen[0])
