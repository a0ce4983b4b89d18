"""The shapes that steps are compiled for.

All tokens of a step share one dimension, padded to a step of a ladder. The ladder is a trade between compile time and
padding. On a CPU a program takes about a second to compile, at every first start, and a server begins with a few of
them. The native kernels skip padding, which then costs a few hundredths of what a token does; so the ladder is sparse:
powers of four, and of two from TWOS_FROM tokens on. Without them it is coarse: powers of two and the middle between
them, a third wasted at most from 16 tokens on. On a GPU that hundreds of sequences share padding costs more: from
FINE_FROM tokens on there are four steps from one power of two to the next, and prompts are cut such that most steps fit
one of them (`cut_sizes`). Fewer tokens take as long as reading the weights takes, whatever their number.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.ops.pages import TILE

FINE_FROM = 256
FINE_ROWS = 128  # decodes, from which on there are four steps from one power of two to the next, too
TIMED_ROWS = 64  # decodes, up to which XLA makes them faster by timing products
MIDDLES_FROM = 16
TWOS_FROM = 64
# Programs that read the pages that decodes share together: for decodes alone from so many rows on, and all others from
# so many tokens on. There the kernel for it ends at once where nothing is shared, which takes a share of short steps.
# A reproducible engine needs no further kernel for it: all of its programs with decodes can do it.
SHARED_ROWS = 64
SHARED_TOKENS = 256
MIDDLE_PROMPTS = (128, 512, 1024, 2048)  # tokens, for which a server on a GPU has programs from the start
SHORT_PROMPTS = (32, 64, 128)  # tokens, for which a server has programs early


class StepShape(NamedTuple):
    """The shape of one forward pass."""

    tokens: int
    decodes_only: bool = False  # one token of each sequence, and the kernels that are fastest for that
    scores: bool = False  # with the log-probabilities of prompt tokens
    fresh_sequences: int = (
        0  # at most this many sequences, all from position 0, and nothing else (cuDNN's kernels); 0: any
    )
    shares: bool = False  # decodes that can read pages together; others than decodes need no such shape

    def __str__(self) -> str:
        of = f" of {self.fresh_sequences} new sequences" if self.fresh_sequences else ""
        how = f"{' scored' if self.scores else ''}{' that share pages' if self.shares else ''}"
        return f"{self.tokens} {'decodes' if self.decodes_only else 'tokens'}{of}{how}"


class Ladder:
    """Every shape there is. One of them is large enough for any plan within the limits, scored chunks apart."""

    def __init__(
        self,
        max_rows: int,
        max_prefill_tokens: int,
        *,
        min_tokens: int = 1,
        is_fine: bool = False,
        skips_padding: bool = False,
        has_decodes: bool = False,
        max_fresh_sequences: int = 0,
        fresh_from: int = 2048,
        max_guesses: int = 0,
        shares: bool = False,
        shares_in_all: bool = False,
    ) -> None:
        self.max_rows = max_rows
        self._is_fine = is_fine
        self._skips_padding = skips_padding
        self.max_tokens = max_rows + max_prefill_tokens
        spaced = sparse if skips_padding else fine if is_fine else coarse
        steps = spaced(min_tokens, self.max_tokens)
        self._tokens = sorted({*steps, max(max_prefill_tokens, min_tokens)})  # a full prefill is the longest step
        self.few_rows = least = min(min_tokens, max_rows)  # decodes, of which fewer take about as long
        rows = fine_rows(least, max_rows) if is_fine else coarse(least, max_rows, middles_from=32)
        # A decode that is alone is common, and takes less time than one among padding. In a reproducible engine it has
        # as many rows as others: their bits depend on it.
        rows = [1, *rows] if is_fine and least > 1 and not shares_in_all else rows
        self._shares, self._shares_from = shares, 0 if shares_in_all else SHARED_TOKENS
        of_decodes = StepShape(0, decodes_only=True, shares=shares and shares_in_all)
        self._decodes = [of_decodes._replace(tokens=count) for count in rows] if has_decodes else []
        # Every second step is enough: reading shared pages once saves more than padding costs.
        rows = coarse(least, max_rows, middles_from=32)[::-2][::-1]
        rows = [count for count in rows if count >= min(SHARED_ROWS, max_rows)]
        rows = rows if shares and has_decodes and not shares_in_all else []
        self.shared = [StepShape(count, decodes_only=True, shares=True) for count in rows]
        least = max(TILE, min_tokens)
        scored = coarse(least, max(max_prefill_tokens, least), factor=8)
        self._scored = [StepShape(size, scores=True) for size in scored]
        longest = next(step for step in self._tokens if step >= max_prefill_tokens)
        steps = [step for step in self._tokens if fresh_from <= step <= longest]
        # For several prompts every second step is enough, as `choose` prefers them to the step before.
        several = steps[::-2][::-1] if max_fresh_sequences > 1 else []
        self._fresh = [StepShape(size, fresh_sequences=1) for size in steps if max_fresh_sequences]
        self._fresh += [StepShape(size, fresh_sequences=max_fresh_sequences) for size in several]
        self._has_guesses = max_guesses > 0
        most = max_rows + max_guesses
        self.sample_sizes = coarse(self.few_rows, most, middles_from=most)

    @property
    def decodes(self) -> Sequence[StepShape]:
        return self._decodes

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """Tokens that steps are padded to, where padding takes time."""
        return () if self._skips_padding else tuple(self._tokens)

    @property
    def cut_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that prompts should be cut for; none on a CPU, where reading weights takes most time."""
        return tuple(size for size in self._tokens if self._is_fine and size >= FINE_FROM)

    def all(self) -> list[StepShape]:
        """All shapes, in the order in which they are compiled."""
        tokens = [StepShape(size) for size in self._tokens]
        return list(dict.fromkeys([*self.first(), *self.early(), *self._decodes, *tokens, *self._fresh, *self._scored]))

    def first(self) -> list[StepShape]:
        """Enough shapes to run any plan, and to run a decode of each sequence; on a GPU, also prompts without computing
        much more than they have."""
        rows = StepShape(next(step for step in self._tokens if step >= self.max_rows))
        middle = [StepShape(size) for size in MIDDLE_PROMPTS if self._is_fine and size in self._tokens]
        return list(dict.fromkeys([self._scored[-1], StepShape(self._tokens[-1]), *self._decodes[-1:], rows, *middle]))

    def early(self) -> list[StepShape]:
        """The shapes with which a short prompt or a single decode runs at full speed."""
        alone = [*self._decodes[:1], StepShape(self._tokens[0])]
        short = [StepShape(next((step for step in self._tokens if step >= size), size)) for size in SHORT_PROMPTS]
        return list(dict.fromkeys([*alone, *(one for one in short if one.tokens in self._tokens)]))

    def num_tiles(self, shape: StepShape) -> int:
        """Tiles of prefills that a step of this shape can have: the full ones, and a shorter one of most sequences."""
        tokens = shape.tokens
        if shape.decodes_only:
            return 0
        # Guesses are short tiles, so there may be one for every sequence.
        is_roomy = tokens >= self.max_tokens or shape.scores or self._has_guesses
        sequences = min(self.max_rows, tokens if is_roomy else tokens // 16 + 8)
        return tokens // TILE + min(sequences, tokens)

    def shares(self, shape: StepShape) -> bool:
        """True if decodes can read shared pages together in a step of this shape."""
        if shape.decodes_only:
            return shape.shares
        return self._shares and shape.tokens >= self._shares_from and not shape.scores and not shape.fresh_sequences

    def choose(self, needed: StepShape, num_tiles: int, among: Iterable[StepShape]) -> StepShape | None:
        """The smallest of these shapes for a step that needs this one; decodes prefer their own shapes."""

        def fits(shape: StepShape) -> bool:
            is_fresh = not shape.fresh_sequences or 1 <= needed.fresh_sequences <= shape.fresh_sequences
            has_kind = shape.scores == needed.scores and is_fresh and (needed.decodes_only or not shape.decodes_only)
            has_kind &= not needed.shares or self.shares(shape)
            return has_kind and shape.tokens >= needed.tokens and self.num_tiles(shape) >= num_tiles

        def cost(shape: StepShape) -> tuple[bool, float, int]:
            return not shape.decodes_only, weighed(shape), shape.fresh_sequences

        return min(filter(fits, among), key=cost, default=None)


def weighed(shape: StepShape) -> float:
    """Tokens that take as long as those of a shape: cuDNN's kernels save as much as an eighth more tokens cost."""
    return shape.tokens * 8 / 9 if shape.fresh_sequences else shape.tokens


def coarse(lowest: int, highest: int, *, middles_from: int = MIDDLES_FROM, factor: int = 2) -> list[int]:
    """Powers of `factor` from `lowest` on, from `middles_from` on also the middle between two; then `highest`, with
    none so close below it that it would save little."""
    steps = []
    step = min(lowest, highest)
    while step * 4 <= highest * 3:
        steps.append(step)
        if factor == 2 and middles_from <= step and step * 6 <= highest * 3:
            steps.append(step * 3 // 2)
        step *= factor
    return [*steps, highest]


def sparse(lowest: int, highest: int) -> list[int]:
    """Powers of four up to TWOS_FROM, then of two; then `highest`."""
    if highest <= TWOS_FROM:
        return coarse(lowest, highest, factor=4)
    few = [step for step in coarse(lowest, TWOS_FROM, factor=4) if step < TWOS_FROM]
    return [*few, *coarse(max(lowest, TWOS_FROM), highest, middles_from=highest)]


def fine(lowest: int, highest: int, fine_from: int = FINE_FROM) -> list[int]:
    """Like `coarse` up to `fine_from`, then four steps from one power of two to the next; then `highest`."""
    if highest <= fine_from:
        return coarse(lowest, highest, middles_from=32)
    steps = coarse(lowest, max(lowest, fine_from), middles_from=32)
    while (step := steps[-1] + (1 << steps[-1].bit_length() - 1) // 4) < highest:
        steps.append(step)
    return [*steps, highest]


def fine_rows(lowest: int, highest: int) -> list[int]:
    """Those of decodes, without steps so close below `highest` that they would save little."""
    steps = fine(lowest, highest, FINE_ROWS)[:-1]
    return [*(step for step in steps if step * 8 <= highest * 7), highest]
