"""Decides which tokens each step computes."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from quire.core.audit import discrepancies
from quire.core.deadlines import Deadline, Deadlines
from quire.core.limits import Limits, SoFar, refuse_what_cannot_go_on
from quire.core.page_pool import PagePool
from quire.core.plan import Chunk, Failure, SlotStart, StepPlan, StepResult, TokenLogprobs, Update
from quire.core.prefix_cache import PrefixCache
from quire.core.queue import Queue
from quire.core.room import Room
from quire.core.running import Running
from quire.core.sequence import Sequence, State
from quire.core.shared_fills import SharedFills
from quire.errors import DeadlineExceeded, InvalidRequest, RequestFailed
from quire.request import FinishReason, Request

# Given the tokens known so far and how many are welcome, guesses at the next ones; an empty tuple for no guess.
Drafter = Callable[[list[int], int], tuple[int, ...]]
# Given the length of a prompt: pages are shared only where this agrees, since positions are computed alike only there.
PrefixKey = Callable[[int], int]


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    steps: int = 0
    preemptions: int = 0
    admissions: int = 0
    cached_tokens: int = 0
    dropped_chunks: int = 0  # results of sequences that had ended or lost their slot


class InFlight(NamedTuple):
    """A step planned and not completed."""

    plan: StepPlan
    rows: list[Sequence]  # of each chunk
    num_decodes: int  # so many chunks, the first ones, are one token each that follows the last one sampled


class Scheduler:
    """Turns requests into steps and results into tokens.

    Each step gives every decoding sequence its next token, then continues the prefills already begun, then admits
    from the queue. Every live sequence is in the queue or runs. The tokens of a request do not depend on how it was
    scheduled. Owned by the engine thread.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        drafter: Drafter | None = None,
        prefix_key: PrefixKey | None = None,
    ) -> None:
        self.limits = limits
        self.room = Room(limits)
        self.burst = limits.max_burst  # tokens; whoever knows how long they take may allow fewer
        self._prefix_key = prefix_key
        self.counters = Counters()
        self.blocked_by: str | None = None  # what kept the head of the queue waiting in the last plan
        self._drafter = drafter
        self._clock = clock
        self._pool = PagePool(limits.num_pages)
        self._cache = PrefixCache(self._pool, limits.page_size)
        self._requests: dict[int, list[Sequence]] = {}  # live sequences
        self._sequences: dict[int, Sequence] = {}
        self._queue = self._new_queue()
        self._running = Running(limits, self._cache)
        self._deadlines = Deadlines(clock)
        self._in_flight: deque[InFlight] = deque()
        self._focus: frozenset[int] | None = None
        self._num_arrived = 0
        self._tokens_since_admission = 0

    # What is there

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not completed."""
        return len(self._in_flight)

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_pages(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._cache.num_lone

    @property
    def num_evicted_pages(self) -> int:
        return self._cache.num_evicted

    def request_ids(self) -> list[int]:
        return list(self._requests)

    def has(self, request_id: int) -> bool:
        return request_id in self._requests

    def request_of(self, sequence_id: int) -> int | None:
        """The request a live sequence belongs to."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else sequence.request_id

    def running_requests(self) -> list[int]:
        """The requests that have a slot."""
        return list(dict.fromkeys(sequence.request_id for sequence in self._running))

    def lengths(self, request_id: int) -> dict[int, tuple[int, int]]:
        """By live sequence of a request: the tokens it has, and as many as it may ever have."""
        return {sequence.id: (len(sequence.tokens), sequence.limit) for sequence in self._requests.get(request_id, ())}

    def sample_of(self, sequence_id: int) -> tuple[int, int] | None:
        """The request a live sequence belongs to, and which of its samples it is."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else (sequence.request_id, sequence.sample)

    def num_computed(self, sequence_id: int) -> int | None:
        """Positions of a live sequence that results have confirmed since it last got its slot."""
        sequence = self._sequences.get(sequence_id)
        return None if sequence is None else sequence.num_computed

    # Coming and going

    def add(self, request: Request, bounded: bool = True, so_far: SoFar | None = None) -> None:
        """Queue a request, or refuse it: at once and for good, or with a time to try again.

        The engine's own requests are not `bounded` by the length of the queue. With `so_far` the request goes on where
        another engine left it, and is not bounded either: it was let in once.
        """
        limits = self.limits
        if request.request_id in self._requests:
            raise InvalidRequest(f"request_id {request.request_id} is in use")
        limits.refuse_what_cannot_fit(request)
        if so_far is None:
            so_far = [()] * request.samples
        else:
            bounded = False
            refuse_what_cannot_go_on(request, so_far)
        if bounded:
            self._queue.refuse_if_full(request)
        self._deadlines.add(request)
        # Without prefix caching only the samples of one request share pages, under a salt of their own.
        key = 0 if self._prefix_key is None else self._prefix_key(len(request.prompt))
        salt = f"{key}+{request.salt}" if limits.prefix_caching else f"-{self._num_arrived}"
        sequences = []
        for sample, generated in enumerate(so_far):
            if generated is None:
                continue
            self._num_arrived += 1
            sequence = Sequence(self._num_arrived, request, sample, salt, generated)
            # How many guesses are right decides what comes after them, so the host must know.
            sequence.waits_for_host = request.waits_for_host or self._drafter is not None
            sequences.append(sequence)
            self._sequences[sequence.id] = sequence
            self._queue.push(sequence)
        self._requests[request.request_id] = sequences

    def abort(self, request_id: int) -> None:
        """End a request now; a request that has ended already is none."""
        for sequence in list(self._requests.get(request_id, ())):
            self._end(sequence)

    def expire(self) -> list[Failure]:
        """End the requests whose time has passed."""
        failures: list[Failure] = []
        while (due := self._deadlines.pop_due()) is not None:
            request_id, which = due
            sequences = self._requests[request_id]
            request = sequences[0].request
            if which is Deadline.END:
                error = DeadlineExceeded(f"timeout_s of {request.timeout_s} passed before the answer was complete")
            elif len(sequences) == request.samples and all(s.state is State.WAITING and not s.epoch for s in sequences):
                error = DeadlineExceeded(
                    f"queue_timeout_s of {request.queue_timeout_s} passed before the request could start",
                    self._queue.retry_after_s(),
                )
            else:
                continue
            self.abort(request_id)
            failures.append(Failure(request_id, error))
        return failures

    def restart(self) -> None:
        """Begin again from the tokens on the host: everything on the device is gone."""
        self._in_flight.clear()
        self._cache.clear()
        for sequence in self._running:
            self._preempt(sequence, keep_pages=False)

    def focus(self, request_ids: Iterable[int] | None) -> None:
        """Run only these requests until told otherwise; None runs all again."""
        self._focus = None if request_ids is None else frozenset(request_ids)
        for sequence in self._running:
            if not self._in_focus(sequence):
                self._preempt(sequence)

    # Accounts

    @property
    def is_at_rest(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._requests and not self._in_flight and not self.num_running

    @property
    def is_balanced(self) -> bool:
        """Whether at rest all pages and slots are back, as far as counts tell."""
        return self.num_free_pages + self.num_cached_pages == self._pool.num_usable and self._running.has_all_slots

    def discrepancies(self) -> list[str]:
        """What is wrong with the accounts of pages, page by page."""
        return discrepancies(self._pool, self._cache, self._running)

    def begin_anew(self) -> None:
        """New accounts, at rest: every page and slot is free, nothing is cached."""
        assert self.is_at_rest
        self._pool = PagePool(self.limits.num_pages)
        self._cache = PrefixCache(self._pool, self.limits.page_size)
        self._queue = self._new_queue()
        self._running = Running(self.limits, self._cache)

    def _new_queue(self) -> Queue:
        fills = SharedFills(self._cache, self.limits.page_size)
        return Queue(fills, self.limits.max_batch_size, self.limits.max_queued, self._clock)

    # One step

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can be computed now."""
        chunks: list[Chunk] = []
        rows: list[Sequence] = []
        self.blocked_by = None
        preemptions = self.counters.preemptions
        burst = self._burst()
        self._plan_decodes(chunks, rows, burst)
        num_decodes = 0 if self._drafter else len(chunks)
        budget = self.limits.max_step_tokens - (sum(c.length for c in chunks) if self._drafter else len(chunks))
        budget = min(budget, self.room.prefill_tokens)
        if burst == 1:
            budget -= self._plan_fills(chunks, rows, budget)
        if self.counters.preemptions != preemptions:  # some of them after their chunk had been planned
            kept = [(c, row) for c, row in zip(chunks, rows, strict=True) if c.epoch == row.epoch]
            chunks, rows = [c for c, _ in kept], [row for _, row in kept]
            num_decodes = sum(c.tokens is None for c in chunks)
        started: list[SlotStart] = []
        if burst == 1 or not chunks:
            burst = 1
            started = self._admit(chunks, rows, budget)
        elif self.num_waiting:
            self.blocked_by = "max_batch_size"
        if not chunks:
            return None
        if burst > 1:
            burst = max(chunk.length for chunk in chunks)
            num_decodes = num_decodes if burst == 1 else 0
        self.counters.steps += 1
        self._tokens_since_admission += burst
        plan = StepPlan(self.counters.steps, tuple(chunks), tuple(started), burst=burst)
        self._in_flight.append(InFlight(plan, rows, num_decodes))
        return plan

    def complete(self, result: StepResult) -> tuple[list[Update], list[Failure]]:
        """Take in the result of the oldest step in flight."""
        plan, rows, num_decodes = self._in_flight.popleft()
        self.room.note_step()
        if result.step != plan.step:
            raise ValueError(f"step {plan.step} is the oldest in flight, the result is of step {result.step}")
        num_sampled = num_decodes + sum(chunk.samples for chunk in islice(plan.chunks, num_decodes, None))
        if len(result.tokens) != num_sampled:
            raise ValueError(f"step {plan.step} samples in {num_sampled} chunks, the result has {len(result.tokens)}")
        updates: list[Update] = []
        failures: list[Failure] = []
        if result.logprobs or result.failed:
            num_decodes = 0
        else:
            self._apply_decodes(islice(zip(plan.chunks, rows, result.tokens, strict=False), num_decodes), updates)
        sampled = islice(result.tokens, num_decodes, None)
        for index in range(num_decodes, len(rows)):
            chunk, sequence = plan.chunks[index], rows[index]
            tokens = next(sampled) if chunk.samples else []
            if chunk.epoch != sequence.epoch:
                self.counters.dropped_chunks += 1
                continue
            failed = result.failed.get(index)
            if failed is not None and not (tokens and sequence.stopping.ends(tokens, sequence.num_generated)):
                self.abort(sequence.request_id)
                failures.append(Failure(sequence.request_id, RequestFailed(failed)))
                continue
            update = self._apply(sequence, chunk, index, tokens, result)
            if update is not None:
                updates.append(update)
        return updates, failures

    def check(self) -> None:
        """Assert every invariant."""
        self._pool.check()
        self._cache.check()
        self._running.check()
        held = dict.fromkeys(self._cache.pages(), 1)
        for sequence in self._running:
            for page in sequence.pages:
                held[page] = held.get(page, 0) + 1
        for page in range(1, self._pool.num_pages):
            assert held.get(page, 0) == self._pool.holders(page), f"page {page} has holders that nobody knows"
        running = {sequence.id for sequence in self._running}
        assert running <= self._sequences.keys(), "a sequence runs that is not live"
        for sequence in self._sequences.values():
            waits = sequence.state is State.WAITING
            assert waits == (sequence in self._queue) == (sequence.id not in running), f"{sequence.id} is lost"
            assert not waits or not sequence.pages
        assert {s.id for group in self._requests.values() for s in group} == self._sequences.keys()
        self._queue.check(self._sequences.values(), self._running)
        self._deadlines.check(set(self._requests))

    # Planning

    def _burst(self) -> int:
        """How many tokens each decode gets: several while nobody could join them and nothing depends on the host."""
        running = self._running
        if self.burst == 1 or self._drafter or self._focus is not None or running.filling or running.num_guided:
            return 1
        if self.num_waiting and running.has_free_slot and self.num_running < self.room.rows:
            return 1
        return self.burst

    def _plan_decodes(self, chunks: list[Chunk], rows: list[Sequence], burst: int) -> None:
        """Every decoding sequence gets its next tokens, those that need a page or guess ahead last."""
        others: list[Sequence] = []
        new_chunk = tuple.__new__  # what Chunk(...) comes to, at half its cost: this loop is most of a plan
        for sequence in self._running.decoding.values():
            start = sequence.num_planned
            end = start + burst
            if end <= sequence.plain_end:
                sequence.num_planned = end
                chunks.append(
                    new_chunk(Chunk, (sequence.id, sequence.epoch, sequence.slot, start, burst, None, (), True, 0))
                )
                rows.append(sequence)
            elif start + 1 < sequence.limit and not (sequence.waits_for_host and start >= len(sequence.tokens)):
                others.append(sequence)
        if others:
            others.sort(key=_age)
            # Prompts come before guesses.
            draft_budget = (
                0 if self._running.filling or self.num_waiting else self.limits.max_step_tokens - self.num_running
            )
            for sequence in others:
                if sequence.state is not State.DECODING:
                    continue  # preempted for an older one
                draft_budget -= self._plan_decode(sequence, chunks, rows, draft_budget, burst)

    def _plan_decode(
        self, sequence: Sequence, chunks: list[Chunk], rows: list[Sequence], draft_budget: int, burst: int
    ) -> int:
        """One decode with all it may need: a page, and guesses to check with it. Returns how many guesses."""
        start = sequence.num_planned
        length = 1 if sequence.waits_for_host else min(burst, sequence.limit - 1 - start)
        pages: list[int] = []
        if start + length > sequence.page_end:
            # Nobody is preempted for what could come later.
            taken = self._cache.take(1) if start < sequence.page_end else self._take_or_preempt(1, sequence)
            if taken is None and start >= sequence.page_end:
                return 0
            pages = taken or []
            self._running.extend(sequence, pages)
            length = min(length, sequence.page_end - start)
        tokens = None
        drafts: tuple[int, ...] = ()
        if self._drafter is not None:
            room = min(draft_budget, sequence.page_end - start - 1, sequence.limit - start - 2)
            if sequence.request.grammar is not None:
                room = 0  # a mask is for one token
            drafts = self._drafter(sequence.tokens, room)[:room] if room > 0 else ()
            tokens = (sequence.tokens[start], *drafts)
        length += len(drafts)
        sequence.num_planned = start + length
        chunks.append(
            Chunk(sequence.id, sequence.epoch, sequence.slot, start, length, tokens, tuple(pages), True, len(drafts))
        )
        rows.append(sequence)
        return len(drafts)

    def _plan_fills(self, chunks: list[Chunk], rows: list[Sequence], budget: int) -> int:
        """Continue the prefills already begun, oldest first. Returns how many tokens of the budget they took."""
        taken = 0
        for sequence in sorted(self._running.filling.values(), key=_age):
            if taken == budget:
                break
            if sequence.state is not State.FILLING:
                continue  # preempted for an older one
            start = sequence.num_planned
            length = min(len(sequence.tokens) - start, budget - taken)
            missing = self.limits.pages_for(start + length) - len(sequence.pages)
            pages = self._take_or_preempt(missing, sequence) if missing > 0 else []
            if pages is None:
                if sequence.state is State.FILLING:
                    self.blocked_by = "pages"  # nobody is admitted past one that runs and is short
                continue
            self._running.extend(sequence, pages)
            self._plan_fill(sequence, length, pages, chunks, rows)
            taken += length
        return taken

    def _admit(self, chunks: list[Chunk], rows: list[Sequence], budget: int) -> list[SlotStart]:
        """Start sequences from the head of the queue for as long as there is room for the first."""
        started: list[SlotStart] = []
        if self.blocked_by is None and not self._enough_wait():
            self.blocked_by = "waiting_served_ratio"
        while self.blocked_by is None and (sequence := self._next_waiting()) is not None:
            if not self._running.has_free_slot or self.num_running >= self.room.rows:
                self.blocked_by = "max_batch_size"
            elif budget <= 0:
                self.blocked_by = "max_batch_prefill_tokens"
            elif not self._total_allows(sequence):
                self.blocked_by = "max_batch_total_tokens"
            else:
                budget -= self._start_or_park(sequence, budget, chunks, rows, started)
        if started:
            self._queue.note_admissions(len(started))
            self._tokens_since_admission = 0
        return started

    def _start_or_park(
        self, sequence: Sequence, budget: int, chunks: list[Chunk], rows: list[Sequence], started: list[SlotStart]
    ) -> int:
        """Start the head of the queue, or let it wait for a page that another computes. Returns its share of the
        budget."""
        max_cached = sequence.num_reusable // self.limits.page_size
        match = self._cache.match(sequence.salt, sequence.tokens, max_cached, sequence.match)
        sequence.match = match
        if self._queue.must_park(sequence, match.place):
            if not self._queue.park(sequence, match.place):
                self.blocked_by = "shared_prefix"
            return 0
        start = match.place.num_pages * self.limits.page_size
        length = min(len(sequence.tokens) - start, budget)
        pages = self._running.take_to_start(sequence, match, start + length)
        if pages is None:
            self.blocked_by = "pages"
            return 0
        self._queue.leave(sequence)
        self._running.start(sequence, pages, match)
        started.append(self._slot_start(sequence))
        self._queue.promise(sequence, match.place)
        self._plan_fill(sequence, length, pages, chunks, rows)
        return length

    def _plan_fill(
        self, sequence: Sequence, length: int, pages: list[int], chunks: list[Chunk], rows: list[Sequence]
    ) -> None:
        start = sequence.num_planned
        end = start + length
        reaches_end = end == len(sequence.tokens)
        samples = reaches_end and end < sequence.limit
        tokens = tuple(sequence.tokens[start:end])
        sequence.num_planned = end
        chunks.append(Chunk(sequence.id, sequence.epoch, sequence.slot, start, length, tokens, tuple(pages), samples))
        rows.append(sequence)
        if reaches_end:
            self._running.decode(sequence)

    def _next_waiting(self) -> Sequence | None:
        if self._focus is None:
            return self._queue.head()
        return self._queue.head(s for request_id in self._focus for s in self._requests.get(request_id, ()))

    def _enough_wait(self) -> bool:
        limits = self.limits
        if not self.num_running or self._tokens_since_admission >= limits.max_waiting_tokens:
            return True
        return self.num_waiting >= int(self.num_running * limits.waiting_served_ratio)

    def _total_allows(self, sequence: Sequence) -> bool:
        total = self.limits.max_batch_total_tokens
        return total is None or self._running.max_tokens + sequence.limit <= total

    def _slot_start(self, sequence: Sequence) -> SlotStart:
        request = sequence.request
        if sequence.epoch == 0:
            sequence.cached_tokens = sequence.num_computed
        self.counters.admissions += 1
        self.counters.cached_tokens += sequence.num_computed
        return SlotStart(
            slot=sequence.slot,
            sequence_id=sequence.id,
            sampling=request.sampling,
            seed=request.seed,
            sample=sequence.sample,
            prompt=request.prompt,
            generated=tuple(sequence.tokens[sequence.num_prompt :]),
            min_tokens=request.min_tokens,
            end_ids=request.end_ids + request.stop_ids,
            prompt_logprobs=request.prompt_logprobs,
        )

    # Results

    def _apply_decodes(self, decodes: Iterable[tuple[Chunk, Sequence, list[int]]], updates: list[Update]) -> None:
        """What `_apply` does, for rows that sampled one token and nothing else. Most rows of most steps are such."""
        new_update = tuple.__new__  # as for chunks
        for chunk, sequence, tokens in decodes:
            if chunk.epoch != sequence.epoch:
                self.counters.dropped_chunks += 1
                continue
            (token,) = tokens
            known = sequence.tokens
            known.append(token)
            sequence.num_computed += 1
            finish = None
            if len(known) >= sequence.limit or token in sequence.stopping.watched:
                finish = sequence.stopping.reason(token, len(known) - sequence.num_prompt)
                if finish is not None:
                    self._end(sequence)
            updates.append(
                new_update(
                    Update,
                    (sequence.request_id, sequence.sample, tokens, finish, sequence.cached_tokens, None, None),
                )
            )

    def _apply(
        self, sequence: Sequence, chunk: Chunk, index: int, tokens: list[int], result: StepResult
    ) -> Update | None:
        """Append what a chunk sampled, and end the sequence where it ends."""
        num_prompt = sequence.num_prompt
        known = sequence.tokens
        finish: FinishReason | None = None
        for position, token in enumerate(tokens):
            known.append(token)
            finish = sequence.stopping.reason(token, len(known) - num_prompt)
            if finish is not None:
                tokens = tokens[: position + 1]
                break
        if chunk.drafts:
            sequence.num_computed = sequence.num_planned = chunk.start + len(tokens)
        elif chunk.tokens is None:
            sequence.num_computed = chunk.start + len(tokens)  # not what was computed beyond its end
        else:
            sequence.num_computed = chunk.start + chunk.length
        prompt_logprobs = None
        if chunk.tokens is not None and not chunk.drafts:
            if sequence.request.prompt_logprobs is not None:
                prompt_logprobs = self._new_prompt_logprobs(sequence, chunk, result.prompt_logprobs.get(index, []))
            if not chunk.samples and sequence.num_computed == sequence.limit:
                finish = FinishReason.LENGTH  # nothing was to be generated
            if finish is None:
                self._publish(sequence)
        if finish is not None:
            self._end(sequence)
        elif not tokens and not prompt_logprobs:
            return None
        logprobs = result.logprobs.get(index) if result.logprobs else None
        return Update(
            sequence.request_id,
            sequence.sample,
            tokens,
            finish,
            sequence.cached_tokens,
            None if logprobs is None else logprobs[: len(tokens)],
            prompt_logprobs,
        )

    def _new_prompt_logprobs(
        self, sequence: Sequence, chunk: Chunk, logprobs: list[TokenLogprobs]
    ) -> list[TokenLogprobs]:
        """Those that were not handed out before a preemption."""
        new = logprobs[max(0, sequence.num_scored - chunk.start) :]
        sequence.num_scored += len(new)
        return new

    def _publish(self, sequence: Sequence) -> None:
        """A prefill got further: its full pages can be shared, and those that waited for them come back."""
        self._running.publish(sequence)
        self._queue.settle(sequence)
        if sequence.state is State.FILLING and sequence.place is not None:
            self._queue.promise(sequence, sequence.place)

    # Pages and slots

    def _take_or_preempt(self, count: int, sequence: Sequence) -> list[int] | None:
        """Pages for a running sequence, at the expense of younger ones; None when it is the youngest itself.

        A decode that gets none returns to the queue; a prefill keeps what it has and waits for the others to end. One
        that runs alone begins again too: it has computed a page that the cache has as well, and will then share it.
        """
        while (pages := self._cache.take(count)) is None:
            youngest = self._running.youngest()
            if youngest is sequence and sequence.state is State.FILLING and self.num_running > 1:
                return None
            self._preempt(youngest)
            self.counters.preemptions += 1
            if youngest is sequence:
                return None
        return pages

    def _preempt(self, sequence: Sequence, keep_pages: bool = True) -> None:
        """Back to the queue, to be computed again from the tokens on the host, or from the cache if they last there."""
        self._running.stop(sequence, keep_pages)
        self._queue.settle(sequence)
        sequence.restart()
        self._queue.push(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self._queue.leave(sequence)
        else:
            self._running.stop(sequence, keep_pages=True)
            self._queue.settle(sequence)
        sequence.state = State.ENDED
        sequence.epoch += 1
        del self._sequences[sequence.id]
        live = self._requests[sequence.request_id]
        live.remove(sequence)
        if not live:
            del self._requests[sequence.request_id]
            self._deadlines.forget(sequence.request_id)
            if not self.limits.prefix_caching:
                self._cache.drop(sequence.salt)

    def _in_focus(self, sequence: Sequence) -> bool:
        return self._focus is None or sequence.request_id in self._focus


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
