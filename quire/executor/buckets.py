"""The shapes a step can have."""

from collections.abc import Iterable
from typing import NamedTuple

LONG_PREFILL = 24  # groups
MANY_GROUPS = 128
MIN_SAMPLES = 8  # after sequences alone: as many as there is a program for anyway
GROUP_SIZE = 32  # tokens of a prefill that read the cache together; a shorter rest is padded to it


class Bucket(NamedTuple):
    """So many decodes, and so many groups of prefill tokens, in one launch."""

    rows: int
    groups: int
    scores: bool = False  # whether the log-probabilities of prompt tokens are wanted
    alone: int = 0  # all groups are those of so many sequences at most, each from its first token on; 0: of any

    @property
    def num_tokens(self) -> int:
        return self.rows + self.groups * GROUP_SIZE

    @property
    def num_samples(self) -> int:
        """How many rows of logits it gives: a power of two, so that few programs can sample from them."""
        if self.alone:
            return max(MIN_SAMPLES, 1 << (self.alone - 1).bit_length())
        return 1 << (self.rows + self.groups - 1).bit_length()

    def __str__(self) -> str:
        parts = [f"{self.rows} rows"] * bool(self.rows) + [f"{self.groups * GROUP_SIZE} tokens"] * bool(self.groups)
        return (
            " + ".join(parts) + (" scored" if self.scores else "") + (f" of {self.alone} alone" if self.alone else "")
        )


class Buckets:
    """Every shape there is: decode-only, prefill with no, few or many decodes beside it, and scored prefill.

    A plan that fits none runs as several launches, so the list is complete for any plan within the limits.
    """

    def __init__(
        self,
        max_rows: int,
        max_prefill_tokens: int,
        min_rows: int = 1,
        min_groups: int = 1,
        most_alone: int = 0,
        alone_from: int = 64,
    ) -> None:
        self.max_rows = max_rows
        # A quarter more than the tokens need: the last group of each prompt is seldom full.
        self.max_groups = -(-max_prefill_tokens * 5 // (GROUP_SIZE * 4))
        self._row_ladder = ladder(min(min_rows, max_rows), max_rows, dense_from=32)
        # What prompts that fill their groups need is a step of its own: they are the longest, and most of the load.
        full = -(-max_prefill_tokens // GROUP_SIZE)
        # Nearly all that many prompts need are a few groups more, where that is little beside them.
        steps = {full, full + full // 16} if full >= MANY_GROUPS else {full}
        self._group_ladder = sorted({*ladder(min(min_groups, full), self.max_groups, dense_from=8), *steps})
        # Long beginnings of sequences have a faster way where they are alone.
        self._alone_from = alone_from
        self._alone = {most: self._enough(full + most - 1) for most in (1, most_alone)} if most_alone else {}
        self.max_scored_groups = self.max_groups  # a chunk is scored whole, however long it is

    def all(self) -> list[Bucket]:
        """In the order in which they should be made ready."""
        decodes = [Bucket(rows, 0) for rows in self._row_ladder]
        mixed = [Bucket(rows, groups) for groups in self._group_ladder for rows in self._beside(groups)]
        scored = [Bucket(0, groups, scores=True) for groups in (1, min(4, self.max_groups), self.max_groups)]
        alone = [
            Bucket(0, groups, alone=most)
            for groups in self._group_ladder
            for most, enough in self._alone.items()
            if self._alone_from <= groups <= enough
        ]
        return list(dict.fromkeys(self.first() + decodes + mixed + alone + scored))

    def _enough(self, groups: int) -> int:
        return next((step for step in self._group_ladder if step >= groups), self.max_groups)

    def _beside(self, groups: int) -> list[int]:
        """How many decodes run beside a prefill: none, a few, or all of them. A few only where all would be much beside
        it: more steps would mean more programs to compile."""
        few = [min(8, self.max_rows)] if groups <= LONG_PREFILL else []
        return [0, *sorted({*few, self.max_rows})]

    def first(self) -> list[Bucket]:
        """Enough to run anything, and a short prompt alone as fast as it gets: what a server needs to begin."""
        rows, groups = self.max_rows, self.max_groups
        largest = [Bucket(rows, 0), Bucket(rows, groups), Bucket(0, groups, scores=True)]
        alone = [Bucket(self._row_ladder[0], 0), *(Bucket(0, count) for count in self._group_ladder[:3])]
        return list(dict.fromkeys(largest + alone))

    def sample_sizes(self) -> list[int]:
        """Every number of rows that is sampled from."""
        return sorted({bucket.num_samples for bucket in self.all()})

    def covering(self, launch: Bucket, among: Iterable[Bucket]) -> Bucket | None:
        """The smallest of these buckets for a launch of this size; a decode alone prefers one that does only that."""

        def fits(bucket: Bucket) -> bool:
            large_enough = bucket.rows >= launch.rows and bucket.groups >= launch.groups
            is_alone = not bucket.alone or 1 <= launch.alone <= bucket.alone
            return large_enough and bucket.scores == launch.scores and is_alone

        fitting = filter(fits, among)
        return min(
            fitting,
            key=lambda b: (b.groups > 0 and not launch.groups, b.num_tokens, b.rows, not b.alone, b.alone),
            default=None,
        )


def ladder(lowest: int, highest: int, dense_from: int) -> list[int]:
    """Powers of two from `lowest` on, from `dense_from` on also what lies halfway between two of them; then `highest`,
    with none so close below it that it would save little."""
    steps = []
    step = lowest
    while step * 4 <= highest * 3:
        steps.append(step)
        if step >= dense_from and step * 6 <= highest * 3:
            steps.append(step * 3 // 2)
        step *= 2
    return [*steps, highest]
