"""Decides how many tokens are guessed for each sequence."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import itemgetter
from weakref import WeakValueDictionary

from quire.core.limits import Limits
from quire.core.lookup import Lookup, PromptPlaces
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
LEAST_CHANCE = 0.2  # of a first guess that is looked up: before steps with guesses are measured, each seems to pay
HIGHEST_CHANCE = 0.95  # of guesses; where they would have to be better, nothing is looked up
# Tokens that a step looks up for one sequence alone, for one of many, and for all beyond the newest of each.
MAX_READ, MIN_READ, MAX_READ_OF_ALL = 2048, 32, 8192

Guess = tuple[float, Sequence]  # its chance, and the sequence that makes it
_chance = itemgetter(0)


class Speculation:
    """Chooses the guesses of each step, by their chances and by what they cost.

    A step takes as long as `fixed` tokens and its own. So `rows` sequences get `rows / (fixed + rows)` tokens in the
    time of one token. A guess that is right is one more token, and each guess costs one. A sequence's first guess is
    right by its chance, the second only if the first is, and so on. Of all guesses the best are made, as many as give
    the most tokens in the least time, padding included. So a sequence whose guesses fail makes none, many sequences
    make fewer than one alone, and a full batch makes none unless nearly all are right.

    Where guesses are looked up, the tokens of each sequence tell what they would have been (`Lookup`), and none is made
    to find out. A model's guesses are known only when they are made: a sequence that makes none tries one now and then.

    A step with guesses may take longer than another of as many tokens, where decodes have programs of their own or get
    several tokens at once. Then fewer guesses pay, and tries cost more: they are later, and of as many guesses as there
    may be. Nothing here reads a clock: what steps take comes from the budget. Owned by the scheduler.
    """

    def __init__(self, limits: Limits, budget: StepBudget, counters: Counters) -> None:
        self.chance = TRIAL_CHANCE  # of a guess, over all sequences; new ones begin with it
        self._looks_up = limits.looks_up
        self._most = limits.max_guesses
        self._most_in_step = limits.max_step_guesses
        self._budget = budget
        self._counters = counters
        self._prompts: WeakValueDictionary[int, PromptPlaces] = WeakValueDictionary()  # by request, of their samples

    def choose(self, sequences: Iterable[Sequence], num_rows: int) -> dict[int, int]:
        """The number of guesses in the next step, by id, of those `sequences` that make any. `num_rows` decode."""
        least = num_rows / (self._budget.fixed_tokens + num_rows)  # tokens for the cost of one, without guesses
        if self._looks_up and least > HIGHEST_CHANCE:
            return {}
        guesses: list[Guess] = []
        due: list[Guess] = []  # tries that are made even if they do not pay
        if self._looks_up:
            self._look_up(sequences, num_rows, least, guesses, due)
        else:
            for sequence in sequences:
                self._add_tried(sequence, least, guesses, due)
        if not guesses and not due:
            return {}
        guesses.sort(key=_chance, reverse=True)  # a sequence's guesses stay in their order
        count = self._best_count([chance for chance, _ in guesses[: self._most_in_step]], num_rows)
        if not count and due:
            guesses, count = sorted(due, key=_chance, reverse=True), min(len(due), self._most_in_step)
        chosen: dict[int, int] = {}
        for _, sequence in guesses[:count]:
            chosen[sequence.id] = chosen.get(sequence.id, 0) + 1
        return chosen

    def _add_tried(self, sequence: Sequence, least: float, guesses: list[Guess], due: list[Guess]) -> None:
        """Add the guesses of a model, whose chances are those of the guesses before."""
        guessing, cost = sequence.guessing, self._budget.guessing_cost
        most = min(self._most, sequence.limit - 2 - sequence.num_planned)
        if guessing is None or most < 1:
            return
        is_due = len(sequence.tokens) >= guessing.next_try and least < TRIAL_CHANCE
        chance = guessing.chance if cost == 1 else max(guessing.chance, guessing.mean)
        if chance > least:
            guesses += [(likely, sequence) for likely in _falling(chance, least, most)]
        elif is_due:
            guesses.append((TRIAL_CHANCE, sequence))
        if is_due and cost > 1:
            due += [(likely, sequence) for likely in _falling(TRIAL_CHANCE, least, most)]

    def _look_up(
        self, sequences: Iterable[Sequence], num_rows: int, least: float, guesses: list[Guess], due: list[Guess]
    ) -> None:
        """Add the guesses that the tokens of sequences make, once enough of them are read. They are tried in spite of
        their cost only to measure it again, where they are likely to be right. Every sequence reads its newest token,
        and those that are behind more, the first ones first."""
        left, most_of_one = MAX_READ_OF_ALL, max(MIN_READ, MAX_READ // max(1, num_rows))
        tries, most_guesses = self._budget.guessing_cost > 1, self._most
        for sequence in sequences:  # most of the time that a choice takes
            guessing, tokens = sequence.guessing, sequence.tokens
            most = sequence.limit - 2 - sequence.num_planned
            if guessing is None or guessing.lookup is None or most < 1:
                continue
            lookup, num_tokens = guessing.lookup, len(tokens)
            behind = num_tokens - lookup.num_read - 1
            if behind > 0:
                before = lookup.num_read
                lookup.read(tokens, sequence.num_prompt, 1 + min(behind, most_of_one - 1, left))
                left = max(0, left - (lookup.num_read - before - 1))
                if lookup.num_read < num_tokens:
                    continue
            elif not behind:
                lookup.read(tokens, sequence.num_prompt, 1)
            if lookup.place < 0 and lookup.again < LEAST_CHANCE:
                continue
            num_unknown = sequence.num_planned + 1 - num_tokens
            chances = lookup.chances_of(num_unknown, most if most < most_guesses else most_guesses, least)
            if chances and chances[0] > LEAST_CHANCE:
                guesses += [(chance, sequence) for chance in chances]
                if tries and chances[0] > TRIAL_CHANCE and num_tokens >= guessing.next_try:
                    due += [(chance, sequence) for chance in chances]

    def _best_count(self, chances: list[float], num_rows: int) -> int:
        """The number of these guesses, the best first, that gives the most tokens in the time of a step: of those that
        are padded to one size the most, since each adds tokens and none adds time."""
        budget = self._budget
        best_rate, best_count = num_rows / budget.cost(num_rows, False), 0
        tokens = list(accumulate(chances, initial=float(num_rows)))
        count = 0
        while count < len(chances):
            count = min(max(count + 1, budget.padded(num_rows + count + 1) - num_rows), len(chances))
            rate = tokens[count] / budget.cost(num_rows + count, True)
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
            lookup = Lookup(self._places_of(sequence.request.request_id)) if self._looks_up else None
            sequence.guessing = guessing = Guessing(self.chance, self._pause(MIN_PAUSE), lookup)
            if self.chance < FEW and lookup is None:
                guessing.pause = self._pause(LATE)
                guessing.next_try = len(sequence.tokens) + guessing.pause

    def _places_of(self, request_id: int) -> PromptPlaces:
        """Those of its prompt, which samples that have begun may have read."""
        if (places := self._prompts.get(request_id)) is None:
            places = self._prompts[request_id] = PromptPlaces()
        return places

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
