"""The choice of a program: a function of a launch and of the programs in a table, and of nothing else.

A table does not change. `Programs` replaces it at named moments, on the engine's thread. Most programs come in batches,
so that the same plans run the same ones whichever compilation finished first.
"""

from collections.abc import Iterable
from functools import lru_cache

from quire.executor.programs.kinds import Key
from quire.executor.programs.ladder import Ladder, StepShape
from quire.executor.sample.sampler import Features
from quire.executor.slots import START_SIZES
from quire.executor.snapshot_arrays import STATE_SIZES
from quire.executor.step import COPY_SIZES

WAYS_OF_PLAIN = ("plain", "filtered", "any")  # to sample where nothing is asked for: the fastest first


class ProgramTable:
    def __init__(self, ladder: Ladder, keys: Iterable[Key] = (), slow: frozenset[Key] = frozenset()) -> None:
        """`slow` are not chosen: a larger one takes less time."""
        self.keys = frozenset(keys)
        self._ladder = ladder
        # Before there are enough for any plan, each is compiled when it is first needed, the smallest for its plan.
        made = [key for key in self.keys - slow if isinstance(key, StepShape)]
        self._has_enough = self.keys.issuperset(ladder.first())
        self._shapes = made if self._has_enough else ladder.all()
        self.forward = lru_cache(4096)(self._forward)
        self._verified = sorted(key[1] for key in self.keys if key[0] == "verify")

    def _forward(self, needed: StepShape, num_tiles: int) -> StepShape:
        """The smallest shape for a launch."""
        found = self._ladder.choose(needed, num_tiles, self._shapes)
        if found is None and needed.shares:
            return self.forward(needed._replace(shares=False), num_tiles)
        assert found is not None, f"no shape for {needed} with {num_tiles} tiles"
        return found

    def decode(self, rows: int, burst: int, most: int, shares: bool = False) -> tuple[StepShape, Key] | None:
        """The program that computes and samples `burst` tokens of each row; None where no single one does. Rows that
        share pages have a program for one token of each."""
        if shares:
            made = [shape for shape in self._ladder.shared if ("shared", shape.tokens) in self.keys]
            fitting = [shape for shape in made if shape.tokens >= rows]
            if fitting:
                return (fitting[0], ("shared", fitting[0].tokens)) if burst == 1 else None
        kind = "decode" if burst == 1 else "burst"
        sizes = [one for one in self._ladder.decodes if one.tokens >= rows and (kind, one.tokens) in self.keys]
        if not sizes or burst not in (1, most):
            return None
        # Two programs for much fewer rows take less time than one.
        apart = self.forward(StepShape(rows, decodes_only=True), 0)
        is_smaller = apart.decodes_only and 2 * max(apart.tokens, self._ladder.few_rows) < sizes[0].tokens
        return None if is_smaller else (sizes[0], (kind, sizes[0].tokens))

    def verify(self, tokens: int) -> tuple[str, int] | None:
        """The program that guesses, computes so many tokens and samples after each; None where no single one does."""
        return next((("verify", size) for size in self._verified if size >= tokens), None)

    def sample(self, count: int, features: Features) -> tuple[str, int]:
        """The program with the fewest rows for `count` samples, and no more features than they need."""
        ways = ("any",) if any(features[1:]) else ("filtered", "any") if features.filters else WAYS_OF_PLAIN
        sizes = [size for size in self._ladder.sample_sizes if size >= count]
        for size in sizes:
            for way in ways:
                if (way, size) in self.keys:
                    return way, size
        return "any", sizes[0]

    def start_size(self, count: int) -> int:
        """The slots that one call starts, of `count`."""
        return self._size("start", count, START_SIZES)

    def copy_size(self, count: int) -> int:
        """The pages that one call copies, of `count`."""
        return self._size("copy", count, COPY_SIZES)

    def state_size(self, kind: str, count: int) -> int:
        """The states of slots that one call of this kind copies, of `count`."""
        return self._size(kind, count, STATE_SIZES)

    def _size(self, kind: str, count: int, sizes: tuple[int, ...]) -> int:
        """The size for `count`, or the largest for a part of them."""
        made = [size for size in sizes if (kind, size) in self.keys] if self._has_enough else []
        return next((size for size in made or sizes if size >= count), (made or sizes)[-1])
