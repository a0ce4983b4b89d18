"""Decides how many tokens are guessed for each sequence."""

from collections.abc import Iterable, Iterator

from quire.core.limits import Limits
from quire.core.sequence import Guessing, Sequence
from quire.core.stats import Counters
from quire.core.step_budget import StepBudget

LAST_SHARE = 0.3  # of the newest guess in a sequence's chance
LAST_SHARE_OF_MEAN = 0.05  # and in its mean, by which costly guesses are not given up for a few wrong ones
LAST_SHARE_OF_ALL = 0.05  # and in the chance of all sequences together
TRIAL_CHANCE = 0.5  # that a guess has for a sequence that tries again
MIN_PAUSE, MAX_PAUSE = 4, 256  # tokens before a sequence tries again; more after each try in vain
LONGER = 4  # times as many
LATE = 64  # tokens before a new sequence tries, where few guesses of others were right
FEW = 0.25  # of the guesses


class Speculation:
    """Chooses the guesses of each step, by their chances and by what they cost.

    A step takes as long as `fixed` tokens and its own. So `rows` sequences get `rows / (fixed + rows)` tokens in the
    time of one token. A guess that is right is one more token, and each guess costs one. A sequence's first guess is
    right by its chance, the second only if the first is, and so on. Of all guesses the best are made, as many as give
    the most tokens in the least time, padding included. So a sequence whose guesses fail makes none, many sequences
    make fewer than one alone, and a full batch makes none unless nearly all are right. A sequence that makes none tries
    one now and then.

    A step with guesses may take longer than another of as many tokens, where decodes have programs of their own or get
    several tokens at once. Then fewer guesses pay, and tries cost more: they are later, and of as many guesses as there
    may be. Nothing here reads a clock: what steps take comes from the budget. Owned by the scheduler.
    """

    def __init__(self, limits: Limits, budget: StepBudget, counters: Counters) -> None:
        self.chance = TRIAL_CHANCE  # of a guess, over all sequences; new ones begin with it
        self._most = limits.max_guesses
        self._most_in_step = limits.max_step_guesses
        self._budget = budget
        self._counters = counters

    def choose(self, sequences: Iterable[Sequence], num_rows: int) -> dict[int, int]:
        """The number of guesses in the next step, by id, of those `sequences` that make any. `num_rows` decode."""
        fixed = self._budget.fixed_tokens
        least = num_rows / (fixed + num_rows)  # tokens for the cost of one, without guesses
        found: list[tuple[float, Sequence]] = []
        due: list[tuple[float, Sequence]] = []  # tries that are made even if they do not pay
        for sequence in sequences:
            guessing = sequence.guessing
            most = min(self._most, sequence.limit - 2 - sequence.num_planned)
            if guessing is None or most < 1:
                continue
            is_due = len(sequence.tokens) >= guessing.next_try and least < TRIAL_CHANCE
            chance = guessing.chance if self._budget.guessing_cost == 1 else max(guessing.chance, guessing.mean)
            if chance > least:
                found += [(likely, sequence) for likely in _falling(chance, least, most)]
            elif is_due:
                found.append((TRIAL_CHANCE, sequence))
            if is_due and self._budget.guessing_cost > 1:
                due += [(likely, sequence) for likely in _falling(TRIAL_CHANCE, least, most)]
        if not found and not due:
            return {}
        found.sort(key=_likely, reverse=True)  # a sequence's guesses stay in their order
        count = self._best_count([likely for likely, _ in found[: self._most_in_step]], num_rows)
        if not count and due:
            found, count = sorted(due, key=_likely, reverse=True), min(len(due), self._most_in_step)
        chosen: dict[int, int] = {}
        for _, sequence in found[:count]:
            chosen[sequence.id] = chosen.get(sequence.id, 0) + 1
        return chosen

    def _best_count(self, likely: list[float], num_rows: int) -> int:
        """The number of these guesses, the best first, that gives the most tokens in the time of a step."""
        fixed = self._budget.fixed_tokens
        best_rate, best_count, tokens, cost = 0.0, 0, float(num_rows), 1.0
        for count in range(len(likely) + 1):
            if count:
                tokens += likely[count - 1]
                cost = self._budget.guessing_cost
            rate = tokens / (fixed + self._budget.padded(num_rows + count)) / cost
            if rate > best_rate:
                best_rate, best_count = rate, count
        return best_count

    def planned(self, sequence: Sequence) -> None:
        """Guesses of `sequence` are in a step."""
        assert sequence.guessing is not None
        sequence.guessing.next_try = len(sequence.tokens) + sequence.guessing.pause

    def learn(self, sequence: Sequence, num_guesses: int, num_right: int) -> None:
        """The first `num_right` of `num_guesses` were right."""
        guessing = sequence.guessing
        assert guessing is not None
        self._counters.guessed_chunks += 1
        self._counters.guesses += num_guesses
        self._counters.right_guesses += num_right
        least, most = self._pause(MIN_PAUSE), self._pause(MAX_PAUSE)
        has_paid = 1 + num_right > self._budget.guessing_cost
        guessing.pause = least if has_paid else min(LONGER * guessing.pause, most)
        for is_right in [True] * num_right + [False] * (num_right < num_guesses):
            guessing.chance += LAST_SHARE * (is_right - guessing.chance)
            guessing.mean += LAST_SHARE_OF_MEAN * (is_right - guessing.mean)
            self.chance += LAST_SHARE_OF_ALL * (is_right - self.chance)

    def begin(self, sequence: Sequence) -> None:
        """A new sequence. None is guessed under a grammar: the mask of a token follows from the one before it, on the
        host."""
        if self._most and sequence.request.grammar is None:
            sequence.guessing = guessing = Guessing(self.chance, self._pause(MIN_PAUSE))
            if self.chance < FEW:
                guessing.pause = self._pause(LATE)
                guessing.next_try = len(sequence.tokens) + guessing.pause

    def _pause(self, tokens: int) -> int:
        """As many tokens as there should be between tries, each of which may take as long as several steps."""
        return round(tokens * max(1.0, self._budget.guessing_cost - 1))


def _falling(chance: float, least: float, most: int) -> Iterator[float]:
    """The chances of up to `most` guesses after each other, as long as they are above `least`."""
    likely = chance
    for _ in range(most):
        if likely <= least:
            break
        yield likely
        likely *= chance


def _likely(guess: tuple[float, Sequence]) -> float:
    return guess[0]
