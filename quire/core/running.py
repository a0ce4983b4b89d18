"""The sequences that have a slot."""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from quire.core.adapter_slots import AdapterSlots
from quire.core.host_tier import HostTier, Restore, host_pages
from quire.core.limits import Limits
from quire.core.page_pool import PagePool
from quire.core.plan import PageCopy, device_copy
from quire.core.prefix_cache import Match, PrefixCache
from quire.core.queue import Queue
from quire.core.restores import Moves, Restores, Restoring, abandon, copies_to
from quire.core.sequence import Sequence, State
from quire.core.snapshots import Snapshots
from quire.core.state_saves import Saved, StateSaves
from quire.core.stats import Counters
from quire.reach import first_page

STEPS_BETWEEN_DEDUPLICATIONS = 64
_age = attrgetter("age")


class Running:
    """The sequences that run, their slots and their pages.

    Every slot is free or owned by one sequence. A sequence is in `prefilling` until all of its known tokens are
    planned, then in `decoding`. Every page is free, or held once by each sequence that reads it and by the prefix
    cache. A sequence that loses its slot without having ended goes back to the queue. Owned by the scheduler.
    """

    def __init__(self, limits: Limits, queue: Queue, counters: Counters, adapters: AdapterSlots) -> None:
        self.prefilling: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.max_tokens = 0  # of all of them together, at their longest
        self.num_guided = 0  # sequences with a grammar
        self.pool = PagePool(limits.num_pages)
        self.host = HostTier(limits.host_pages + 1, limits.max_page_saves) if limits.host_pages else None
        self.snapshots = Snapshots(limits.snapshots) if limits.snapshots else None
        self.cache = PrefixCache(self.pool, limits.page_size, limits.page_groups, self.host, self.snapshots)
        self.saves = None if self.snapshots is None else StateSaves(limits, self.snapshots, queue)
        self.adapters = adapters
        self._limits = limits
        self._page_size = limits.page_size
        self._queue = queue
        self._counters = counters
        self._next_deduplication = 0  # the step
        self._num_groups = len(limits.page_groups)
        self._windows = [(group, reach) for group, reach in enumerate(limits.page_groups) if reach is not None]
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._restores = None if self.host is None else Restores(self.host, limits.page_size, limits.page_groups)

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot: members may leave meanwhile."""
        return iter([*self.prefilling.values(), *self.decoding.values()])

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    # Starting and stopping

    def match(self, sequence: Sequence) -> Match:
        """The part of a sequence that waits which is in the cache, and what follows it on the host."""
        match = sequence.match = self.cache.match(sequence.salt, sequence.tokens, sequence.num_reusable, sequence.match)
        restore = None if self._restores is None else self._restores.find(sequence, match)
        return match if restore is None else match._replace(partial_page=None, num_partial_tokens=0, restore=restore)

    def start(self, sequence: Sequence, match: Match, max_tokens: int) -> tuple[int, list[PageCopy]] | None:
        """`sequence` leaves the queue for a slot, to compute up to `max_tokens` tokens after those that are cached.

        Returns the number of tokens, and the copies of pages that it begins with. None when pages are short: all known
        tokens must fit in addition to what running sequences need soon, or one would soon be preempted again.
        One that would run by itself starts with as many tokens as there are pages for. One that continues on the host
        starts with none: `restore` and `reserve` give it what it begins with.
        """
        limits, cache, is_alone = self._limits, self.cache, not len(self)
        tables, restore = cache.tables(match), match.restore
        matched = [page for table in tables for page in table if page]
        matched += [] if restore is None else restore.device_pages()
        wanted = limits.pages_to_start(len(sequence.tokens)) - len(matched) + self._pages_ahead()
        if wanted > cache.num_available and not is_alone:  # and holding pages makes none available
            return self.start(sequence, match, max_tokens) if self._deduplicate_to_start() else None
        copied = [] if match.partial_page is None else list(match.partial_page.pages)
        kept = copied if self.saves is None else match.end_pages()  # not evicted for the pages that are taken
        cache.hold(matched)
        cache.hold(kept)
        start = match.cursor.num_pages * limits.page_size + match.num_partial_tokens
        cuts = [] if self.saves is None else self.saves.cuts(sequence, match)
        length = min((cuts[0] if cuts else sequence.prompt_end) - start, max_tokens)
        if is_alone:
            length = min(length, self._num_fitting(len(tables[0])) - start)
        missing = 0 if restore is not None else limits.pages_for(start + length) - len(tables[0])
        pages = None
        if length > 0 and (is_alone or wanted <= cache.num_available):
            pages = cache.take(missing * self._num_groups)
        cache.release(kept)
        if pages is None:
            cache.release(matched)
            match = match._replace(partial_page=None, num_partial_tokens=0)
            return self.start(sequence, match, max_tokens) if copied else None
        if self.saves is not None:
            if not match.has_state:  # it went with a page that was evicted: nothing kept it
                cache.release((*matched, *pages))
                return self.start(sequence, self.match(sequence), max_tokens)
            self.saves.begin(sequence, match, cuts)
        self._queue.leave(sequence)
        self._queue.promise(sequence, match.cursor)
        sequence.own_tokens()
        sequence.state, sequence.slot = State.PREFILLING, self._free_slots.pop()
        sequence.num_computed = sequence.num_planned = start
        sequence.published, sequence.match = match.cursor, None
        sequence.tables, sequence.first_held = tables, [table.count(0) for table in tables]
        if restore is not None:
            self._begin_restore(sequence, restore)
        self._extend(sequence, pages)
        self.prefilling[sequence.id] = sequence
        self.max_tokens += sequence.limit
        self.num_guided += sequence.request.grammar is not None
        return length, [device_copy(page, tables[g][match.cursor.num_pages]) for g, page in enumerate(copied)]

    def decode(self, sequence: Sequence) -> None:
        """All known tokens of `sequence` that are not to be decoded are planned."""
        sequence.decode()
        del self.prefilling[sequence.id]
        self.decoding[sequence.id] = sequence
        if self.saves is not None:
            self.saves.decode(sequence)

    def stop(self, sequence: Sequence, keep_pages: bool = True) -> None:
        """`sequence` gives up its slot and pages; what it computed stays in the cache if `keep_pages`."""
        if keep_pages:
            self._publish(sequence)
        self.cache.release(page for table in sequence.tables for page in table if page)
        if sequence.restore is not None:
            self._end_restore(sequence.restore)
        self._free_slots.append(sequence.slot)
        self.adapters.stop(sequence)
        self.max_tokens -= sequence.limit
        self.num_guided -= sequence.request.grammar is not None
        if self.decoding.pop(sequence.id, None) is None:
            del self.prefilling[sequence.id]
        self._queue.promise(sequence, None)

    def preempt(self, sequence: Sequence, keep_pages: bool = True) -> None:
        """Back to the queue, to be computed again from the tokens on the host, or from the cache if they last there."""
        self.stop(sequence, keep_pages)
        sequence.restart()
        self._queue.push(sequence)

    # Pages

    def reserve(self, sequence: Sequence, length: int, preempts: bool = True) -> int:
        """Pages for the next `length` positions of a prefill. Returns the number of positions: all, or 0 when pages are
        short. One that runs by itself gets as many as there are."""
        start, num_pages = sequence.num_planned, len(sequence.tables[0])
        if len(self) == 1:
            length = min(length, max(1, self._num_fitting(num_pages) - start))
        missing = self._limits.pages_for(start + length) - num_pages
        return length if missing <= 0 or self.grow(sequence, missing, preempts) else 0

    def grow(self, sequence: Sequence, num_pages: int, preempts: bool = True) -> bool:
        """Give `sequence` `num_pages` more in each group, at the expense of younger ones if it `preempts`.

        When it is the youngest itself a decode returns to the queue; a prefill keeps what it has and waits for the
        others to end. One that runs by itself waits until its window frees pages. Otherwise it begins again too: it has
        computed a page that the cache has as well, and will then share it.
        """
        pages = self._take(sequence, num_pages * self._num_groups, preempts)
        if pages is None:
            return False
        self._extend(sequence, pages)
        return True

    def _take(self, sequence: Sequence, count: int, preempts: bool) -> list[int] | None:
        if self._windows:
            self._give_back(sequence)
        while (pages := self.cache.take(count)) is None:
            if self._deduplicate_pages():
                continue
            if not preempts:
                return None
            youngest = max(self, key=_age)
            if youngest is sequence:
                waits = sequence.state is State.PREFILLING
                if len(self) == 1:
                    waits = bool(self._windows) and sequence.num_computed < sequence.num_planned
                if waits:
                    return None
            self.preempt(youngest)
            self._counters.preemptions += 1
            if youngest is sequence:
                return None
        return pages

    def restore(
        self, sequence: Sequence, max_copies: int, at_least_one: bool, preempts: bool
    ) -> tuple[list[PageCopy], Restoring] | None:
        """Copy the next pages of `sequence` from the host, as far as `max_copies` go; None when pages are short."""
        restore = sequence.restore
        assert restore is not None
        count = restore.num_rows_within(max_copies, at_least_one)
        rows = restore.rows[:count]
        sources = host_pages(rows)
        pages = self._take(sequence, len(sources), preempts)
        if pages is None:
            return None
        targets = iter(pages)
        self._extend(sequence, [page if isinstance(page, int) else next(targets) for row in rows for page in row])
        sequence.num_planned += count * self._page_size
        del restore.rows[:count]
        if not restore.rows:
            sequence.restore = None
        return copies_to(sources, pages), Restoring(sequence, sequence.epoch, sequence.num_planned, sources)

    def take_moves(self, restored: list[Restoring]) -> tuple[list[PageCopy], Moves | None]:
        """The copies to the host that the plan under construction must begin with, and all its copies between tiers."""
        if self.host is None:
            return [], None
        copies, saved = self.host.take_saves()
        return copies, Moves(saved, restored) if saved or restored else None

    def abandon_moves(self, moves: Iterable[Moves | None]) -> None:
        """Everything on the device is gone, and steps with these copies have no results."""
        if self.host is not None:
            self.host.abandon(self.host.take_saves()[1])
            for abandoned in moves:
                if abandoned is not None:
                    abandon(self.host, abandoned)

    def trim(self, sequence: Sequence, end: int) -> None:
        """Take back the pages behind position `end`, which the device does not know: a chunk brings those it fills."""
        keep = self._limits.pages_for(end)
        for table in sequence.tables:
            self.cache.release(table[keep:])
            del table[keep:]
        self._extend(sequence, [])

    def _begin_restore(self, sequence: Sequence, restore: Restore) -> None:
        assert self.host is not None
        self.host.hold(host_pages(restore.rows))
        sequence.restore, sequence.restore_end = restore, restore.end * self._page_size
        for group, reach in self._windows:
            sequence.first_held[group] = first_page(reach, sequence.restore_end, self._page_size)

    def _end_restore(self, restore: Restore) -> None:
        assert self.host is not None
        self.host.release(host_pages(restore.rows))
        self.cache.release(restore.device_pages())

    def publish(self, sequence: Sequence, is_last: bool = False) -> None:
        """A prefill got further, to its end if it `is_last`: its full pages can be shared, and sequences that waited
        for them are back in line."""
        self._publish(sequence)
        self._give_back(sequence)
        if self.saves is not None:
            return  # pages alone are none that others wait for
        self._queue.promise(sequence, None if is_last else sequence.published)

    def save_state(self, saved: list[Saved], sequence: Sequence) -> None:
        """Its chunk in the step with these saves ends where one of its own is due."""
        assert self.saves is not None
        if (save := self.saves.save(sequence)) is not None:
            saved.append(save)

    def confirm_saves(self, saves: list[tuple[Saved, bool]]) -> None:
        """A step that saved states has its result. Whether each sequence had its slot until then."""
        assert self.saves is not None
        for saved, _ in saves:
            if saved.epoch == saved.sequence.epoch:
                self._publish(saved.sequence)
        self.saves.confirm(saves)

    def drop_saves(self, saved: list[Saved]) -> list[Saved]:
        """Those of a plan under construction without those of sequences that were preempted for it."""
        for save in saved:
            if save.epoch != save.sequence.epoch:
                assert self.snapshots is not None
                self.snapshots.abandon(save.snapshot)
        return [save for save in saved if save.epoch == save.sequence.epoch]

    def _deduplicate_pages(self) -> bool:
        """Free pages that stand twice in the cache: where a prefix had no snapshot or is replayed, sequences have
        computed their own pages for tokens that the cache has pages for."""
        for sequence in self if self.saves is not None or self._limits.replays else ():
            self._publish(sequence)
            if sequence.published is not None and self.cache.deduplicate(sequence.published, sequence.tables):
                return True
        return False

    def _deduplicate_to_start(self) -> bool:
        """The same, but not in each step of a wait that it cannot end: it looks at every page of every sequence."""
        if self._counters.steps < self._next_deduplication:
            return False
        has_freed = self._deduplicate_pages()
        self._next_deduplication = self._counters.steps + (0 if has_freed else STEPS_BETWEEN_DEDUPLICATIONS)
        return has_freed

    def _pages_ahead(self) -> int:
        """Pages that the running sequences need soon: those of their known tokens, and one more in each group."""
        count = self._num_groups * len(self)
        for sequence in self if self._limits.replays else self.prefilling.values():
            held = sum(
                max(0, len(table) - first) for table, first in zip(sequence.tables, sequence.first_held, strict=True)
            )
            is_short = sequence.state is State.PREFILLING or sequence.num_planned < sequence.replay_end
            count += max(0, self._limits.pages_to_start(len(sequence.tokens)) - held) if is_short else 0
        return count

    def _num_fitting(self, num_pages: int) -> int:
        """Positions that fit in `num_pages` of each group and those that are available."""
        return (num_pages + self.cache.num_available // self._num_groups) * self._page_size

    def _extend(self, sequence: Sequence, pages: list[int]) -> None:
        tables, count = sequence.tables, self._num_groups
        for group in range(count):
            tables[group] += pages[group::count]
        sequence.cover(len(tables[0]) * self._page_size)

    def _publish(self, sequence: Sequence) -> None:
        num_pages = sequence.num_shared // self._page_size if sequence.reuses else 0  # none would find them
        sequence.published = self.cache.publish(
            sequence.salt, sequence.tokens, sequence.tables, num_pages, sequence.published, sequence.digests
        )

    def _give_back(self, sequence: Sequence) -> None:
        """Release the pages that no position after the confirmed ones reads. They are published first, so that they
        can be matched for as long as they are not evicted."""
        for group, reach in self._windows:
            held, first = sequence.first_held[group], first_page(reach, sequence.num_computed, self._page_size)
            if first > held:
                self._publish(sequence)
                table = sequence.tables[group]
                self.cache.release(table[held:first])
                table[held:first] = [0] * (first - held)
                sequence.first_held[group] = first

    # Accounts

    @property
    def is_balanced(self) -> bool:
        """True if, when none runs, all pages and slots are back, as far as counts tell."""
        all_pages = self.pool.num_free + self.cache.num_evictable == self.pool.num_usable
        all_pages &= all(part is None or part.is_balanced for part in (self.host, self.snapshots))
        return all_pages and len(self._free_slots) == self._limits.max_batch_size

    def page_discrepancies(self) -> list[str]:
        """A line for each page with a wrong count of holders, and one for each other wrong count."""
        pool, cache = self.pool, self.cache
        owners: dict[int, list[str]] = {page: ["the prefix cache"] for page in cache.pages()}
        for sequence in self:
            shared = [] if sequence.restore is None else sequence.restore.device_pages()
            for page in (page for table in (*sequence.tables, shared) for page in table if page):
                owners.setdefault(page, []).append(f"request {sequence.request_id}")
        free = pool.free_pages()
        lines = []
        for page in range(1, pool.num_pages):
            known, counted, times_free = owners.get(page, []), pool.holders(page), free.get(page, 0)
            if counted != len(known) or times_free != (not known):
                by = ", ".join(known) or "none"
                lines.append(
                    f"page {page} is held by {by}; {counted} holders are counted, it is free {times_free} times"
                )
        evictable = cache.count_evictable()
        if evictable != cache.num_evictable:
            lines.append(f"{evictable} pages of the prefix cache can be evicted; {cache.num_evictable} are counted")
        return lines

    def check(self) -> None:
        """Assert every invariant."""
        self.pool.check()
        self.cache.check()
        if self.snapshots is not None:
            self.snapshots.check()
        if self.host is not None:
            self.host.check()
        self.adapters.check(self)
        assert not self.page_discrepancies()
        slots = list(self._free_slots)
        for sequence in self:
            slots.append(sequence.slot)
            pages = [page for table in sequence.tables for page in table if page]
            assert len(set(pages)) == len(pages), f"sequence {sequence.id} has a page twice"
            for table, held, reach in zip(sequence.tables, sequence.first_held, self._limits.page_groups, strict=True):
                assert sequence.page_end == len(table) * self._page_size
                assert not any(table[:held])
                assert all(table[held:])
                confirmed = max(sequence.num_computed, sequence.restore_end)
                first = 0 if reach is None else first_page(reach, confirmed, self._page_size)
                assert held <= first, "a page was given back early"
            assert sequence.plain_end <= sequence.page_end
            assert self.saves is None or sequence.save_at > sequence.num_planned or sequence.id in self.prefilling
            assert sequence.num_computed <= sequence.num_planned <= sequence.page_end
            assert 0 <= sequence.num_unsure <= sequence.num_planned - sequence.num_computed
            assert sequence.num_computed <= len(sequence.tokens) <= max(sequence.limit, sequence.num_prompt)
        assert sorted(slots) == list(range(self._limits.max_batch_size)), "a slot is lost or owned twice"
        assert not self.prefilling.keys() & self.decoding.keys()
        assert all(sequence.state is State.PREFILLING for sequence in self.prefilling.values())
        assert all(sequence.state is State.DECODING for sequence in self.decoding.values())
        assert self.max_tokens == sum(sequence.limit for sequence in self), "the sum of the limits is wrong"
        assert self.num_guided == sum(sequence.request.grammar is not None for sequence in self)
