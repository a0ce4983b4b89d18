"""Chooses the contents of each step."""

from operator import attrgetter

from quire.core.completion import StepInFlight
from quire.core.limits import Limits
from quire.core.plan import Chunk, Kind, StepPlan
from quire.core.queue import Queue
from quire.core.running import Running
from quire.core.sequence import Sequence, State
from quire.core.speculation import Speculation
from quire.core.stats import Counters
from quire.core.step_budget import StepBudget
from quire.core.step_builder import StepBuilder, forced_tokens, guided, slot_start

SHARE = 4  # one part in this many of a step's prompt tokens is for those behind the first, if it is long
MAX_PASSED = 4  # long prompts that wait which shorter ones may pass in a step
MAX_WAITING_FOR_ADAPTERS = 32  # sequences that others may pass in a step
_age, _turn = attrgetter("age"), attrgetter("turn")
_new = tuple.__new__  # Chunk(...) at half its cost: chunks are most of a plan


class Planner:
    """Chooses the contents of the next step.

    Each step gives every decoding sequence its next token, then continues the prefills already begun, then admits
    from the queue. Owned by the scheduler.
    """

    def __init__(
        self,
        limits: Limits,
        budget: StepBudget,
        queue: Queue,
        running: Running,
        counters: Counters,
        speculation: Speculation,
    ) -> None:
        self.blocked_by: str | None = None  # the limit that kept the head of the queue waiting in the last plan
        self._limits = limits
        self._budget = budget
        self._queue = queue
        self._running = running
        self._counters = counters
        self._speculation = speculation
        self._tokens_since_admission = 0

    def plan(self) -> StepInFlight | None:
        """The next step; None when nothing can be computed now."""
        step = StepBuilder(self._budget.restores(bool(self._running.decoding)))
        self.blocked_by = None
        preemptions = self._counters.preemptions
        guesses = self._guesses() if self._limits.max_guesses else {}
        burst = 1 if guesses else self._burst()
        forced = self._plan_decodes(step, burst, guesses)
        num_decodes = len(step.chunks)
        num_guesses = self._plan_guesses(step, guesses) if guesses else 0
        step.budget = step.allowance = self._budget.prefill_beside(len(step.chunks) + num_guesses + len(forced))
        for sequence in forced:
            if sequence.state is State.DECODING:  # and not preempted for an older one
                self._plan_forced(step, sequence)
        if self._running.prefilling:
            self._plan_prefills(step)
        if self._counters.preemptions != preemptions:
            num_decodes = step.without_preempted()
        if burst == 1 or not step.chunks:
            burst = 1
            self._admit(step)
        elif self._queue:
            self.blocked_by = "max_batch_size"
        self._plan_ends(step)
        if not step.chunks and not step.restored:
            return None
        saves, moves = self._running.take_moves(step.restored)
        if burst > 1:
            burst = max(chunk.length for chunk in step.chunks)
            num_decodes = num_decodes if burst == 1 else 0
        self._counters.steps += 1
        self._tokens_since_admission += burst
        plan = StepPlan(
            self._counters.steps,
            tuple(step.chunks),
            (*saves, *step.copies),
            tuple(step.started),
            guided(step) if self._running.num_guided else (),
            forced_tokens(step) if self._running.num_guided else (),
            tuple(step.loads),
            burst,
        )
        return StepInFlight(plan, step.rows, num_decodes, moves)

    def _burst(self) -> int:
        """Tokens for each decode: several while no sequence could join them and nothing depends on the host."""
        queue, running = self._queue, self._running
        if self._budget.burst == 1 or queue.focus is not None or running.prefilling or running.num_guided:
            return 1
        if queue and running.has_free_slot and len(running) < self._budget.rows:
            return 1
        return self._budget.burst

    def _guesses(self) -> dict[int, int]:
        """The number of tokens to guess for each sequence, by id. None during a search for a fault, which must know the
        positions of a step."""
        decoding = self._running.decoding
        return self._speculation.choose(decoding.values(), len(decoding)) if self._queue.focus is None else {}

    def _plan_guesses(self, step: StepBuilder, guesses: dict[int, int]) -> int:
        """The sequences that guess, by age; first those that have no page for a guess and decode. Returns the number
        of guesses."""
        total, begin = 0, len(step.chunks)
        decoding = self._running.decoding
        for sequence in sorted([decoding[id] for id in guesses if id in decoding], key=_age):
            if sequence.state is State.DECODING:  # and not preempted for an older one
                before = sequence.num_planned
                self._plan_decode(step, sequence, 1 + guesses[sequence.id], Kind.VERIFY)
                num_guesses = max(0, sequence.num_planned - before - 1)
                if num_guesses:
                    sequence.num_unsure += num_guesses
                    self._speculation.planned(sequence)
                    total += num_guesses
        order = sorted(range(begin, len(step.chunks)), key=lambda at: step.chunks[at].kind is Kind.VERIFY)
        step.chunks[begin:] = [step.chunks[at] for at in order]
        step.rows[begin:] = [step.rows[at] for at in order]
        return total

    def _plan_decodes(self, step: StepBuilder, burst: int, guesses: dict[int, int]) -> list[Sequence]:
        """Every decoding sequence without guesses gets its next tokens, those that need a page last. Returns those, by
        age, whose next tokens are forced: they have none yet."""
        others: list[Sequence] = []
        forced: list[Sequence] = []
        chunks, rows, decode = step.chunks, step.rows, Kind.DECODE
        new_chunk = _new
        for sequence in self._running.decoding.values():  # most of the time that a plan takes
            start = sequence.num_planned
            end = start + burst
            if guesses and sequence.id in guesses:
                continue
            if start + 1 < sequence.forced_end and start + 2 < sequence.limit:
                forced.append(sequence)
            elif end <= sequence.plain_end:
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
                    self._plan_decode(step, sequence, burst)
        return sorted(forced, key=_age)

    def _plan_forced(self, step: StepBuilder, sequence: Sequence) -> None:
        """The token that is sampled last and those that must follow it, as far as one page and the budget go."""
        start = sequence.num_planned
        most = min(sequence.forced_end - start, self._limits.page_size, 1 + step.budget)
        self._plan_decode(step, sequence, max(1, most), Kind.FORCED)
        length = sequence.num_planned - start
        if length > 1:
            step.budget -= length - 1
            step.allowance -= length - 1

    def _plan_decode(self, step: StepBuilder, sequence: Sequence, most: int, kind: Kind = Kind.DECODE) -> None:
        """A decode that needs a page in each group, or that ends within the `most` tokens that it may have. It is of
        this `kind` if it has more than one."""
        start, num_pages = sequence.num_planned, len(sequence.tables[0])
        length = min(most, sequence.limit - 1 - start)
        if start + length > sequence.page_end:
            # None is preempted for tokens that could come later, nor before it is known how many guesses were right.
            is_needed = start == sequence.page_end
            preempts = is_needed and not sequence.num_unsure
            if not self._running.grow(sequence, 1, preempts) and is_needed:
                return
            length = min(length, sequence.page_end - start)
        step.add(sequence, kind if length > 1 else Kind.DECODE, length, num_pages, True)

    def _plan_prefills(self, step: StepBuilder) -> None:
        """Continue the prefills already begun, in their turn. One that is in the step is not preempted for an older."""
        youngest: Sequence | None = None  # in the step
        for sequence in sorted(self._running.prefilling.values(), key=_turn):
            if sequence.state is State.PREFILLING:  # and not preempted for an older one
                before = step.prompts
                self._continue_prefill(step, sequence, youngest is None or youngest.age < sequence.age)
                if step.prompts != before and (youngest is None or youngest.age < sequence.age):
                    youngest = sequence

    def _continue_prefill(self, step: StepBuilder, sequence: Sequence, preempts: bool = True) -> None:
        """Copy the next pages from the host as long as it has them, then compute."""
        has_pages = sequence.restore is None or self._plan_restore(step, sequence, preempts)
        rest = len(sequence.tokens) - sequence.num_planned
        leaves_share = step.longest is not None and rest > step.allowance and self._is_passed(sequence)
        if has_pages and sequence.restore is None and step.allowance > 0 and not leaves_share:
            num_pages = len(sequence.tables[0])
            length = self._running.reserve(sequence, min(rest, step.allowance), preempts)
            if has_pages := length > 0:
                self._plan_prompt(step, sequence, length, num_pages if sequence.is_started else 0)
        if not has_pages and sequence.state is State.PREFILLING:
            self.blocked_by = "pages"  # none is admitted past one that runs and is short

    def _plan_restore(self, step: StepBuilder, sequence: Sequence, preempts: bool) -> bool:
        """False when pages are short."""
        restored = self._running.restore(sequence, step.restores_left, not step.restored, preempts)
        if restored is None:
            return False
        step.restore(*restored)
        return True

    def _plan_prompt(self, step: StepBuilder, sequence: Sequence, length: int, num_pages: int) -> None:
        """The next tokens of a prompt, which has pages for `length` of them. The first that does not end in this step
        leaves a share to others, so that short prompts are not stuck behind a long one; if one that waits has its turn
        before it, the share is its own, and the rest is for others."""
        if step.longest is None and length < len(sequence.tokens) - sequence.num_planned:
            step.longest = sequence, length, num_pages
            share = step.budget // SHARE
            step.allowance = step.share = step.budget - max(1, share) if self._is_passed(sequence) else share
        else:
            if step.last is not None:
                self._plan_prefill(step, *step.last)
            step.last = sequence, length, num_pages
            step.budget -= length
            step.allowance -= length

    def _is_passed(self, sequence: Sequence) -> bool:
        """True if one that waits has its turn before `sequence`, which runs."""
        head = self._queue.head()
        return head is not None and head.turn < sequence.turn

    def _plan_ends(self, step: StepBuilder) -> None:
        """The first prompt that does not end gets what is left. It, or the last of the others, is cut where the step
        would be a little longer than the executor's sizes."""
        length_of_longest = 0 if step.longest is None else min(step.longest[1], step.budget)
        length_of_last = 0 if step.last is None else step.last[1]
        if step.last is not None or step.longest is not None:
            others = sum([chunk.length for chunk in step.chunks])
            has_decodes = bool(step.chunks) and step.chunks[0].kind is Kind.DECODE
            excess = self._budget.excess(others + length_of_longest + length_of_last, has_decodes)
            if excess < length_of_longest:
                length_of_longest -= excess
            elif step.longest is None and excess < length_of_last:  # else one behind it would have more than a share
                length_of_last -= excess
        for planned, length in ((step.last, length_of_last), (step.longest, length_of_longest)):
            if planned is not None:
                sequence, reserved, num_pages = planned
                if length < reserved:
                    self._running.trim(sequence, sequence.num_planned + length)
                self._plan_prefill(step, sequence, length, num_pages)

    def _admit(self, step: StepBuilder) -> None:
        """Start sequences from the head of the queue for as long as there is room for the first."""
        queue, running = self._queue, self._running
        others_run = bool(running)
        rule = self._limits.admission_rule(len(running), len(queue), self._tokens_since_admission)
        if self.blocked_by is None and rule is None:
            self.blocked_by = "waiting_served_ratio"
        while self.blocked_by is None and (sequence := queue.head()) is not None:
            if not running.has_free_slot or len(running) >= self._budget.rows:
                self.blocked_by = "max_batch_size"
            elif step.allowance <= 0:
                self.blocked_by = "max_batch_prefill_tokens"
            elif not self._total_allows(sequence):
                self.blocked_by = "max_batch_total_tokens"
            else:
                self._start_or_park(step, sequence)
        for sequence in step.passed:
            queue.push(sequence)
            self.blocked_by = "max_batch_prefill_tokens"
        for waiting in step.waits_for_adapter:
            queue.push(waiting)
            self.blocked_by = self.blocked_by or "adapters"
        if step.num_admitted:
            queue.note_admissions(step.num_admitted)
            self._tokens_since_admission = 0
            if others_run and rule is not None:
                self._counters.joined_by[rule] += 1

    def _start_or_park(self, step: StepBuilder, sequence: Sequence) -> None:
        """Start the head of the queue, or let it wait: for a page that another computes, or, where it is long, for the
        long prompt before it."""
        if not self._running.adapters.has_room(sequence):
            if len(step.waits_for_adapter) == MAX_WAITING_FOR_ADAPTERS:
                self.blocked_by = "adapters"
            else:
                self._queue.leave(sequence)
                step.waits_for_adapter.append(sequence)
            return
        match = self._running.match(sequence)
        if self._queue.must_park(sequence, match.cursor):
            if not self._queue.park(sequence, match.cursor):
                self.blocked_by = "shared_prefix"
            return
        rest = len(sequence.tokens) - match.num_tokens(self._limits.page_size)
        if step.longest is not None and rest > step.allowance and not self._may_begin(step, rest):
            if len(step.passed) == MAX_PASSED:
                self.blocked_by = "max_batch_prefill_tokens"
            else:
                self._queue.leave(sequence)
                step.passed.append(sequence)
            return
        started = self._running.start(sequence, match, step.allowance)
        if started is None:
            self.blocked_by = "pages"
            return
        length, copies = started
        step.copies += copies
        if (load := self._running.adapters.start(sequence)) is not None:
            step.loads.append(load)
        step.num_admitted += 1
        if match.restore is None:
            self._plan_prompt(step, sequence, length, 0)
        else:
            self._continue_prefill(step, sequence, preempts=False)

    def _may_begin(self, step: StepBuilder, rest: int) -> bool:
        """A prompt of `rest` tokens may begin in a share too small for it if it fits the share of a full step; one
        prompt at a time. Short prompts are then not stuck when `max_prefill_beside_decodes` is small."""
        return step.allowance == step.share and rest <= self._limits.max_batch_prefill_tokens // SHARE

    def _plan_prefill(self, step: StepBuilder, sequence: Sequence, length: int, num_pages: int) -> None:
        end = sequence.num_planned + length
        reaches_end = end == len(sequence.tokens)
        if not sequence.is_started:
            self._start_slot(step, sequence)
        step.add(sequence, Kind.PREFILL, length, num_pages, samples=reaches_end and end < sequence.limit)
        if reaches_end:
            self._running.decode(sequence)

    def _total_allows(self, sequence: Sequence) -> bool:
        total = self._limits.max_batch_total_tokens
        return total is None or self._running.max_tokens + sequence.limit <= total

    def _start_slot(self, step: StepBuilder, sequence: Sequence) -> None:
        """Its first chunk is planned next: what comes before that was cached."""
        sequence.is_started = True
        step.started.append(slot_start(sequence))
        if sequence.epoch == 0:
            sequence.cached_tokens = sequence.num_planned
        self._counters.admissions += 1
        self._counters.cached_tokens += sequence.num_planned
