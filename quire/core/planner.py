"""Chooses the contents of each step."""

from operator import attrgetter

from quire.core.completion import StepInFlight
from quire.core.limits import Limits
from quire.core.plan import Chunk, Kind, StepPlan
from quire.core.prompt_planner import PromptPlanner
from quire.core.queue import Queue
from quire.core.running import Running
from quire.core.sequence import Sequence, State
from quire.core.speculation import Speculation
from quire.core.stats import Blocker, Counters
from quire.core.step_budget import StepBudget
from quire.core.step_builder import StepBuilder, forced_tokens, guided, state_saves

_age = attrgetter("age")
_new = tuple.__new__  # Chunk(...) at half its cost: chunks are most of a plan


class Planner:
    """Chooses the contents of the next step.

    Each step gives every decoding sequence its next token, then prompts get theirs: `PromptPlanner`. Owned by the
    scheduler.
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
        self.prompts = PromptPlanner(limits, budget, queue, running, counters)
        self._limits = limits
        self._budget = budget
        self._queue = queue
        self._running = running
        self._counters = counters
        self._speculation = speculation

    def plan(self) -> StepInFlight | None:
        """The next step; None when nothing can be computed now."""
        step = StepBuilder()
        prompts = self.prompts
        prompts.blocked_by = None
        preemptions = self._counters.preemptions
        guesses = self._guesses() if self._limits.max_guesses else {}
        burst = 1 if guesses else self._burst()
        forced, replayed = self._plan_decodes(step, burst, guesses)
        num_decodes = len(step.chunks)
        for sequence in replayed:
            if sequence.state is State.DECODING:  # and not preempted for an older one
                self._plan_replay(step, sequence)
        num_guesses = self._plan_guesses(step, guesses) if guesses else 0
        self._plan_forced(step, forced, len(step.chunks) + num_guesses)
        if guesses or forced:
            step.sort(num_decodes)
        step.restores_left = self._budget.restores(bool(step.chunks))
        if self._running.prefilling:
            prompts.continue_prefills(step)
        if self._counters.preemptions != preemptions:
            num_decodes = step.without_preempted()
            step.saved = self._running.drop_saves(step.saved)
        if burst == 1 or not step.chunks:
            burst = 1
            prompts.admit(step)
        elif self._queue:
            prompts.blocked_by = Blocker.SLOTS
        prompts.end(step)
        if not step.chunks and not step.restored:
            return None
        saves, moves = self._running.take_moves(step.restored)
        if burst > 1:
            burst = max(chunk.length for chunk in step.chunks)
            num_decodes = num_decodes if burst == 1 else 0
        self._counters.steps += 1
        prompts.tokens_since_admission += burst
        plan = StepPlan(
            self._counters.steps,
            tuple(step.chunks),
            (*saves, *step.copies),
            tuple(step.started),
            guided(step) if self._running.num_guided else (),
            forced_tokens(step) if self._running.num_guided else (),
            tuple(step.loads),
            burst,
            state_saves(step),
            step.num_verified,
            step.num_forced,
            step.num_prefills,
        )
        return StepInFlight(plan, step.rows, num_decodes, moves, tuple(step.saved))

    def _burst(self) -> int:
        """Tokens for each decode: several while no sequence could join them and nothing depends on the host."""
        queue, running = self._queue, self._running
        if self._budget.burst == 1 or queue.focus is not None or running.prefilling or running.num_guided:
            return 1
        if queue and running.has_free_slot and len(running) < self._budget.rows:
            return 1
        return 1 if self._budget.decodes_singly else self._budget.burst

    def _guesses(self) -> dict[int, int]:
        """The number of tokens to guess for each sequence, by id. None during a search for a fault, which must know the
        positions of a step."""
        if self._budget.decodes_singly or self._queue.focus is not None:
            return {}
        decoding = self._running.decoding
        return self._speculation.choose(decoding.values(), len(decoding))

    def _plan_guesses(self, step: StepBuilder, guesses: dict[int, int]) -> int:
        """The sequences that guess, by age. Those that have no page for a guess decode. Returns the number of
        guesses."""
        total = 0
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
        return total

    def _plan_decodes(
        self, step: StepBuilder, burst: int, guesses: dict[int, int]
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Every decoding sequence without guesses gets its next tokens, those that need a page last. Returns those, by
        age, that have none yet: whose next tokens are forced, and those whose next tokens are known."""
        others: list[Sequence] = []
        forced: list[Sequence] = []
        replayed: list[Sequence] = []
        chunks, rows, decode = step.chunks, step.rows, Kind.DECODE
        new_chunk = _new
        may_force = self._running.num_guided > 0 and not self._budget.decodes_singly
        for sequence in self._running.decoding.values():  # most of the time that a plan takes
            start = sequence.num_planned
            end = start + burst
            if guesses and sequence.id in guesses:
                continue
            if may_force and start + 1 < sequence.forced_end and start + 2 < sequence.limit:
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
            elif start < sequence.replay_end:
                replayed.append(sequence)
            elif start + 1 < sequence.limit:
                others.append(sequence)
        if others:
            others.sort(key=_age)
            for sequence in others:
                if sequence.state is State.DECODING:  # and not preempted for an older one
                    self._plan_decode(step, sequence, burst)
        return sorted(forced, key=_age), sorted(replayed, key=_age)

    def _plan_replay(self, step: StepBuilder, sequence: Sequence) -> None:
        """The next token that it generated before it lost its pages: by a decode, as then."""
        num_pages = len(sequence.tables[0])
        if sequence.num_planned < sequence.page_end or self._running.grow(sequence, 1):
            step.add(sequence, Kind.DECODE, 1, num_pages, samples=False)
            sequence.cover(sequence.page_end)

    def _plan_forced(self, step: StepBuilder, forced: list[Sequence], num_beside: int) -> None:
        """For each, the token that is sampled last and those that must follow it, as far as one page and the budget go.
        What they leave of it, beside the `num_beside` tokens of others, is for prompts."""
        before, num_more = len(step.chunks), 0
        most_more = self._budget.prefill_beside(num_beside + len(forced))
        for sequence in forced:
            if sequence.state is State.DECODING:  # and not preempted for an older one
                start = sequence.num_planned
                most = min(sequence.forced_end - start, self._limits.page_size, 1 + most_more - num_more)
                self._plan_decode(step, sequence, max(1, most), Kind.FORCED)
                num_more += max(0, sequence.num_planned - start - 1)
        num_planned = len(step.chunks) - before  # the others have no page, or are computed anew
        if num_planned < len(forced):
            most_more = self._budget.prefill_beside(num_beside + num_planned)
        step.budget = step.allowance = max(0, most_more - num_more)

    def _switch(self, sequence: Sequence) -> None:
        """Compute it anew, with all tokens that it has, once the host knows them."""
        if sequence.num_computed == sequence.switch_end:
            self._running.preempt(sequence)

    def _plan_decode(self, step: StepBuilder, sequence: Sequence, most: int, kind: Kind = Kind.DECODE) -> None:
        """A decode that needs a page in each group, or that ends within the `most` tokens that it may have. It is of
        this `kind` if it has more than one."""
        start, num_pages = sequence.num_planned, len(sequence.tables[0])
        length = min(most, sequence.last_end - start)
        if not length:
            self._switch(sequence)
            return
        if sequence.save_at:
            length = min(length, sequence.save_at - start)
        if start + length > sequence.page_end:
            # None is preempted for tokens that could come later, nor before it is known how many guesses were right.
            is_needed = start == sequence.page_end
            preempts = is_needed and not sequence.num_unsure
            if not self._running.grow(sequence, 1, preempts) and is_needed:
                return
            length = min(length, sequence.page_end - start)
        step.add(sequence, kind if length > 1 else Kind.DECODE, length, num_pages, True)
        if sequence.num_planned == sequence.save_at:
            self._running.save_state(step.saved, sequence)
