"""Chooses the prompt tokens of each step."""

from operator import attrgetter

from quire.core.limits import Limits
from quire.core.plan import Kind
from quire.core.queue import Queue
from quire.core.running import Running
from quire.core.sequence import Sequence, State
from quire.core.stats import Blocker, Counters
from quire.core.step_budget import StepBudget
from quire.core.step_builder import StepBuilder, slot_start

SHARE = 4  # one part in this many of a step's prompt tokens is for those behind the first, if it is long
MAX_PARKED_TOKENS = 2**18  # of sequences that a step parks, which are compared with those of others: about 10 ms
MAX_PASSED = 4  # long prompts that wait which shorter ones may pass in a step
MAX_WAITING_FOR_ADAPTERS = 32  # sequences that others may pass in a step
_turn = attrgetter("turn")


class PromptPlanner:
    """Continues the prefills that run, then admits from the queue. Owned by the planner."""

    def __init__(self, limits: Limits, budget: StepBudget, queue: Queue, running: Running, counters: Counters) -> None:
        self.blocked_by: Blocker | None = None  # the limit that kept the head of the queue waiting in the last plan
        self.tokens_since_admission = 0
        self._limits = limits
        self._budget = budget
        self._queue = queue
        self._running = running
        self._counters = counters

    def continue_prefills(self, step: StepBuilder) -> None:
        """Continue the prefills that run, in their turn. One that is in the step is not preempted for an older."""
        youngest: Sequence | None = None  # in the step
        for sequence in sorted(self._running.prefilling.values(), key=_turn):
            if sequence.state is State.PREFILLING:  # and not preempted for an older one
                before = step.prompts_version
                self._continue_prefill(step, sequence, youngest is None or youngest.age < sequence.age)
                if step.prompts_version != before and (youngest is None or youngest.age < sequence.age):
                    youngest = sequence

    def _continue_prefill(self, step: StepBuilder, sequence: Sequence, preempts: bool = True) -> None:
        """Copy the next pages from the host as long as it has them, then compute."""
        waits = sequence.restore is not None and self._limits.restores_ahead and step.computes
        has_pages = sequence.restore is None or self._plan_restore(step, sequence, preempts)
        rest = sequence.goal - sequence.num_planned
        leaves_share = step.longest is not None and rest > step.allowance and self._is_passed(sequence)
        if has_pages and sequence.restore is None and step.allowance > 0 and not waits and not leaves_share:
            num_pages = len(sequence.tables[0])
            length = self._running.reserve(sequence, min(rest, step.allowance), preempts)
            if has_pages := length > 0:
                self._plan_prompt(step, sequence, length, num_pages if sequence.is_started else 0)
        if not has_pages and sequence.state is State.PREFILLING:
            self.blocked_by = Blocker.PAGES  # none is admitted past one that runs and is short

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
        if step.longest is None and length < sequence.goal - sequence.num_planned:
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

    def end(self, step: StepBuilder) -> None:
        """The first prompt that does not end gets what is left. It, or the last of the others, is cut where the step
        would be a little longer than the executor's sizes."""
        length_of_longest = 0 if step.longest is None else min(step.longest[1], step.budget)
        length_of_last = 0 if step.last is None else step.last[1]
        if step.last is not None or step.longest is not None:
            others = sum([chunk.length for chunk in step.chunks])
            has_decodes = len(step.chunks) > step.num_prefills
            excess = self._budget.excess(others + length_of_longest + length_of_last, has_decodes)
            if has_decodes and 2 * excess > length_of_longest + length_of_last:
                excess = 0  # more than half of a prompt's share is never left: the next step has decodes, too
            if excess < length_of_longest:
                length_of_longest -= excess
            elif step.longest is None and excess < length_of_last:  # else one behind it would have more than a share
                length_of_last -= excess
        if step.longest is not None and length_of_longest and self._running.saves is not None:
            length_of_longest = self._running.saves.aligned(step.longest[0], length_of_longest)
        for planned, length in ((step.last, length_of_last), (step.longest, length_of_longest)):
            if planned is not None:
                sequence, reserved, num_pages = planned
                if length < reserved:
                    self._running.trim(sequence, sequence.num_planned + length)
                self._plan_prefill(step, sequence, length, num_pages)

    def admit(self, step: StepBuilder) -> None:
        """Start sequences from the head of the queue for as long as there is room for the first."""
        queue, running = self._queue, self._running
        others_run = bool(running)
        rule = self._limits.admission_rule(len(running), len(queue), self.tokens_since_admission)
        if self.blocked_by is None and rule is None:
            self.blocked_by = Blocker.WAITING_RULE
        while self.blocked_by is None and (sequence := queue.head()) is not None:
            if not running.has_free_slot or len(running) >= self._budget.rows:
                self.blocked_by = Blocker.SLOTS
            elif step.allowance <= 0:
                self.blocked_by = Blocker.PREFILL_TOKENS
            elif not self._total_allows(sequence):
                self.blocked_by = Blocker.TOTAL_TOKENS
            else:
                self._start_or_park(step, sequence)
        for sequence in step.passed:
            queue.push(sequence)
            self.blocked_by = Blocker.PREFILL_TOKENS
        for waiting in step.waits_for_adapter:
            queue.push(waiting)
            self.blocked_by = self.blocked_by or Blocker.ADAPTERS
        if step.num_admitted:
            queue.note_admissions(step.num_admitted)
            self.tokens_since_admission = 0
            if others_run and rule is not None:
                self._counters.joined_by[rule] += 1

    def _start_or_park(self, step: StepBuilder, sequence: Sequence) -> None:
        """Start the head of the queue, or let it wait: for a page that another computes, or, where it is long, for the
        long prompt before it."""
        if not self._running.adapters.has_room(sequence):
            if len(step.waits_for_adapter) == MAX_WAITING_FOR_ADAPTERS:
                self.blocked_by = Blocker.ADAPTERS
            else:
                self._queue.leave(sequence)
                step.waits_for_adapter.append(sequence)
            return
        match = self._running.match(sequence)
        if (promised := self._queue.promised_to(sequence, match.cursor)) is not None:
            if step.parked_tokens < MAX_PARKED_TOKENS and self._queue.park(sequence, match.cursor, promised):
                step.parked_tokens += sequence.num_reusable
            else:
                self.blocked_by = Blocker.SHARED_PREFIX
            return
        rest = sequence.prompt_end - match.num_tokens(self._limits.page_size)
        if step.longest is not None and rest > step.allowance and not self._may_begin(step, rest):
            if len(step.passed) == MAX_PASSED:
                self.blocked_by = Blocker.PREFILL_TOKENS
            else:
                self._queue.leave(sequence)
                step.passed.append(sequence)
            return
        started = self._running.start(sequence, match, step.allowance)
        if started is None:
            self.blocked_by = Blocker.PAGES
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
        samples = end == len(sequence.tokens) and end < sequence.limit
        if not sequence.is_started:
            self._start_slot(step, sequence)
        step.add(sequence, Kind.PREFILL, length, num_pages, samples)
        if end == sequence.save_at:
            self._running.save_state(step.saved, sequence)
        if end == sequence.prompt_end:
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
