"""Decides what each step holds."""

from collections.abc import Iterator

from quire.core.counters import BACKPRESSURE, CHUNKING, WAIT_EXCEEDED
from quire.core.limits import Limits
from quire.core.live_sequences import LiveSequences
from quire.core.plan import Chunk, Kind, SlotStart, StepPlan
from quire.core.room import Room
from quire.core.sequence import Sequence, State
from quire.core.step_in_flight import StepInFlight


class Planner:
    """Chooses what the next step holds.

    Each step gives every decoding sequence its next token, then continues the prefills already begun, then admits
    from the queue. Owned by the scheduler.
    """

    def __init__(self, limits: Limits, room: Room, live: LiveSequences) -> None:
        self.burst = limits.max_burst  # tokens; whoever knows how long they take may allow fewer
        self.blocked_by: str | None = None  # what kept the head of the queue waiting in the last plan
        self._limits = limits
        self._room = room
        self._live = live
        self._counters = live.counters
        self._tokens_since_admission = 0

    def plan(self) -> StepInFlight | None:
        """The next step; None when nothing can be computed now."""
        chunks: list[Chunk] = []
        rows: list[Sequence] = []
        self.blocked_by = None
        preemptions = self._counters.preemptions
        burst = self._burst()
        self._plan_decodes(chunks, rows, burst)
        num_decodes = len(chunks)
        budget = min(self._limits.max_step_tokens - num_decodes, self._room.prefill_tokens)
        if burst == 1:
            budget -= self._plan_fills(chunks, rows, budget)
        if self._counters.preemptions != preemptions:  # some of them after their chunk had been planned
            kept = [(c, row) for c, row in zip(chunks, rows, strict=True) if c.epoch == row.epoch]
            chunks, rows = [c for c, _ in kept], [row for _, row in kept]
            num_decodes = sum(c.kind is Kind.DECODE for c in chunks)
        started: list[SlotStart] = []
        if burst == 1 or not chunks:
            burst = 1
            started = self._admit(chunks, rows, budget)
        elif self._live.queue:
            self.blocked_by = "max_batch_size"
        if not chunks:
            return None
        if burst > 1:
            burst = max(chunk.length for chunk in chunks)
            num_decodes = num_decodes if burst == 1 else 0
        self._counters.steps += 1
        self._tokens_since_admission += burst
        guided = tuple(self._guided(chunks, rows)) if self._live.running.num_guided else ()
        plan = StepPlan(self._counters.steps, tuple(chunks), started=tuple(started), guided=guided, burst=burst)
        return StepInFlight(plan, rows, num_decodes)

    def _burst(self) -> int:
        """How many tokens each decode gets: several while nobody could join them and nothing depends on the host."""
        live, running = self._live, self._live.running
        if self.burst == 1 or live.focus is not None or running.filling or running.num_guided:
            return 1
        if live.queue and running.has_free_slot and len(running) < self._room.rows:
            return 1
        return self.burst

    def _plan_decodes(self, chunks: list[Chunk], rows: list[Sequence], burst: int) -> None:
        """Every decoding sequence gets its next tokens, those that need a page last."""
        running = self._live.running
        others: list[Sequence] = []
        decode = Kind.DECODE
        new_chunk = tuple.__new__  # what Chunk(...) comes to, at half its cost: this loop is most of a plan
        for sequence in running.decoding.values():
            start = sequence.num_planned
            end = start + burst
            if end <= sequence.plain_end:
                sequence.num_planned = end
                row = (
                    sequence.request_id,
                    sequence.sample,
                    sequence.epoch,
                    sequence.slot,
                    decode,
                    start,
                    burst,
                    (),
                    True,
                )
                chunks.append(new_chunk(Chunk, row))
                rows.append(sequence)
            elif start + 1 < sequence.limit:
                others.append(sequence)
        if others:
            others.sort(key=_age)
            for sequence in others:
                if sequence.state is State.DECODING:  # and not preempted for an older one
                    self._plan_decode(sequence, chunks, rows, burst)

    def _plan_decode(self, sequence: Sequence, chunks: list[Chunk], rows: list[Sequence], burst: int) -> None:
        """One decode that needs a page or ends within the burst."""
        live = self._live
        start = sequence.num_planned
        length = min(burst, sequence.limit - 1 - start)
        pages: list[int] = []
        if start + length > sequence.page_end:
            # Nobody is preempted for what could come later.
            taken = live.cache.take(1) if start < sequence.page_end else live.take_or_preempt(1, sequence)
            if taken is None and start >= sequence.page_end:
                return
            pages = taken or []
            live.running.extend(sequence, pages)
            length = min(length, sequence.page_end - start)
        sequence.num_planned = start + length
        chunks.append(_chunk(sequence, Kind.DECODE, start, length, pages, True))
        rows.append(sequence)

    def _plan_fills(self, chunks: list[Chunk], rows: list[Sequence], budget: int) -> int:
        """Continue the prefills already begun, oldest first. Returns how many tokens of the budget they took."""
        live = self._live
        taken = 0
        for sequence in sorted(live.running.filling.values(), key=_age):
            if taken == budget:
                break
            if sequence.state is not State.FILLING:
                continue  # preempted for an older one
            start = sequence.num_planned
            length = min(len(sequence.tokens) - start, budget - taken)
            missing = self._limits.pages_for(start + length) - len(sequence.pages)
            pages = live.take_or_preempt(missing, sequence) if missing > 0 else []
            if pages is None:
                if sequence.state is State.FILLING:
                    self.blocked_by = "pages"  # nobody is admitted past one that runs and is short
                continue
            live.running.extend(sequence, pages)
            self._plan_fill(sequence, length, pages, chunks, rows)
            taken += length
        return taken

    def _admit(self, chunks: list[Chunk], rows: list[Sequence], budget: int) -> list[SlotStart]:
        """Start sequences from the head of the queue for as long as there is room for the first."""
        live = self._live
        started: list[SlotStart] = []
        others_run = bool(live.running)
        rule = self._admission_rule()
        if self.blocked_by is None and rule is None:
            self.blocked_by = "waiting_served_ratio"
        while self.blocked_by is None and (sequence := live.next_waiting()) is not None:
            if not live.running.has_free_slot or len(live.running) >= self._room.rows:
                self.blocked_by = "max_batch_size"
            elif budget <= 0:
                self.blocked_by = "max_batch_prefill_tokens"
            elif not self._total_allows(sequence):
                self.blocked_by = "max_batch_total_tokens"
            else:
                budget -= self._start_or_park(sequence, budget, chunks, rows, started)
        if started:
            live.queue.note_admissions(len(started))
            self._tokens_since_admission = 0
            if others_run and rule is not None:
                self._counters.joined_by[rule] += 1
        return started

    def _start_or_park(
        self, sequence: Sequence, budget: int, chunks: list[Chunk], rows: list[Sequence], started: list[SlotStart]
    ) -> int:
        """Start the head of the queue, or let it wait for a page that another computes. Returns its share of the
        budget."""
        live = self._live
        max_cached = sequence.num_reusable // self._limits.page_size
        match = live.cache.match(sequence.salt, sequence.tokens, max_cached, sequence.match)
        sequence.match = match
        if live.queue.must_park(sequence, match.place):
            if not live.queue.park(sequence, match.place):
                self.blocked_by = "shared_prefix"
            return 0
        start = match.place.num_pages * self._limits.page_size
        length = min(len(sequence.tokens) - start, budget)
        pages = live.running.take_to_start(sequence, match, start + length)
        if pages is None:
            self.blocked_by = "pages"
            return 0
        live.start(sequence, pages, match)
        started.append(self._slot_start(sequence))
        self._plan_fill(sequence, length, pages, chunks, rows)
        return length

    def _plan_fill(
        self, sequence: Sequence, length: int, pages: list[int], chunks: list[Chunk], rows: list[Sequence]
    ) -> None:
        start = sequence.num_planned
        end = start + length
        reaches_end = end == len(sequence.tokens)
        samples = reaches_end and end < sequence.limit
        sequence.num_planned = end
        chunks.append(_chunk(sequence, Kind.PREFILL, start, length, pages, samples))
        rows.append(sequence)
        if reaches_end:
            self._live.running.decode(sequence)

    def _guided(self, chunks: list[Chunk], rows: list[Sequence]) -> Iterator[int]:
        """The chunks that sample under a grammar, by index."""
        for index, (chunk, sequence) in enumerate(zip(chunks, rows, strict=True)):
            if chunk.samples and sequence.request.grammar is not None:
                yield index

    def _admission_rule(self) -> str | None:
        """The rule by which sequences may begin now; None while they must wait for more to wait."""
        limits, live = self._limits, self._live
        if not limits.max_waiting_tokens or not limits.waiting_served_ratio:
            return CHUNKING
        if not live.running or self._tokens_since_admission >= limits.max_waiting_tokens:
            return WAIT_EXCEEDED
        # At least the whole part of the product, which may be beyond all whole numbers.
        return BACKPRESSURE if len(live.queue) + 1 > len(live.running) * limits.waiting_served_ratio else None

    def _total_allows(self, sequence: Sequence) -> bool:
        total = self._limits.max_batch_total_tokens
        return total is None or self._live.running.max_tokens + sequence.limit <= total

    def _slot_start(self, sequence: Sequence) -> SlotStart:
        request = sequence.request
        if sequence.epoch == 0:
            sequence.cached_tokens = sequence.num_computed
        self._counters.admissions += 1
        self._counters.cached_tokens += sequence.num_computed
        return SlotStart(
            slot=sequence.slot,
            sampling=request.sampling,
            seed=request.seed,
            sample=sequence.sample,
            prompt=request.prompt,
            generated=tuple(sequence.tokens[sequence.num_prompt :]),
            min_tokens=request.min_tokens,
            end_ids=request.end_ids + request.stop_ids,
            prompt_logprobs=request.prompt_logprobs,
        )


def _chunk(sequence: Sequence, kind: Kind, start: int, length: int, pages: list[int], samples: bool) -> Chunk:
    new_pages = (tuple(pages),) if pages else ()
    return Chunk(
        sequence.request_id, sequence.sample, sequence.epoch, sequence.slot, kind, start, length, new_pages, samples
    )


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
