"""The sequences that have a slot."""

from collections.abc import Iterator

from quire.core.limits import Limits
from quire.core.prefix_cache import Match, PrefixCache
from quire.core.sequence import Sequence, State


class Running:
    """Who runs, and the slots and pages that go with it.

    Every slot is free or owned by one sequence. A sequence is in `filling` until all of its known tokens are planned,
    then in `decoding`. Every page in use is held once by each sequence that reads it. Owned by the scheduler.
    """

    def __init__(self, limits: Limits, cache: PrefixCache) -> None:
        self.filling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.max_tokens = 0  # of all of them together, at their longest
        self.num_guided = 0  # sequences whose tokens a grammar restricts
        self._limits = limits
        self._cache = cache
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.filling) + len(self.decoding)

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot: members may leave meanwhile."""
        return iter([*self.filling.values(), *self.decoding.values()])

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def has_all_slots(self) -> bool:
        return len(self._free_slots) == self._limits.max_batch_size

    def youngest(self) -> Sequence:
        return max(self, key=_age)

    def take_to_start(self, sequence: Sequence, match: Match, end: int) -> list[int] | None:
        """Hold the matched pages and take what positions before `end` need beyond them; None, and nothing taken, when
        pages are short. All known tokens must fit beside one more page for each that runs, or one would soon be
        preempted again."""
        limits, matched = self._limits, match.pages
        wanted = limits.pages_for(len(sequence.tokens)) - len(matched) + len(self)
        if wanted > self._cache.num_available:
            return None  # and holding pages makes none available
        self._cache.hold(matched)
        pages = self._cache.take(limits.pages_for(end) - len(matched)) if wanted <= self._cache.num_available else None
        if pages is None:
            self._cache.release(matched)
            return None
        return matched + pages

    def start(self, sequence: Sequence, pages: list[int], match: Match) -> None:
        """`sequence` gets a slot, with `pages` of which those of the match are computed."""
        sequence.state = State.FILLING
        sequence.slot = self._free_slots.pop()
        sequence.num_computed = sequence.num_planned = match.place.num_pages * self._limits.page_size
        sequence.place, sequence.match = match.place, None
        self.filling[sequence.id] = sequence
        self.max_tokens += sequence.limit
        self.num_guided += sequence.request.grammar is not None
        self.extend(sequence, pages)

    def extend(self, sequence: Sequence, pages: list[int]) -> None:
        sequence.pages += pages
        sequence.page_end += len(pages) * self._limits.page_size
        sequence.plain_end = min(sequence.page_end, sequence.limit - 1)

    def decode(self, sequence: Sequence) -> None:
        """All known tokens of `sequence` are planned."""
        sequence.state = State.DECODING
        del self.filling[sequence.id]
        self.decoding[sequence.id] = sequence

    def publish(self, sequence: Sequence) -> None:
        """The full pages that `sequence` has computed can be shared from now on."""
        num_pages = sequence.num_computed // self._limits.page_size
        sequence.place = self._cache.publish(sequence.salt, sequence.tokens, sequence.pages[:num_pages], sequence.place)

    def stop(self, sequence: Sequence, keep_pages: bool) -> None:
        """`sequence` gives up its slot and pages; what it computed stays in the cache if `keep_pages`."""
        if keep_pages:
            self.publish(sequence)
        self._cache.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        self.max_tokens -= sequence.limit
        self.num_guided -= sequence.request.grammar is not None
        if self.decoding.pop(sequence.id, None) is None:
            del self.filling[sequence.id]

    def check(self) -> None:
        slots = list(self._free_slots)
        for sequence in self:
            slots.append(sequence.slot)
            assert len(set(sequence.pages)) == len(sequence.pages), f"sequence {sequence.id} has a page twice"
            assert sequence.page_end == len(sequence.pages) * self._limits.page_size
            assert sequence.plain_end <= sequence.page_end
            assert sequence.num_computed <= sequence.num_planned <= sequence.page_end
            assert sequence.num_computed <= len(sequence.tokens) <= max(sequence.limit, sequence.num_prompt)
        assert sorted(slots) == list(range(self._limits.max_batch_size)), "a slot is lost or owned twice"
        assert not self.filling.keys() & self.decoding.keys()
        assert all(sequence.state is State.FILLING for sequence in self.filling.values())
        assert all(sequence.state is State.DECODING for sequence in self.decoding.values())
        assert self.max_tokens == sum(sequence.limit for sequence in self), "the sum of the limits is wrong"
        assert self.num_guided == sum(sequence.request.grammar is not None for sequence in self)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
