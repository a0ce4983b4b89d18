"""Sets the limits of steps by what steps take."""

from collections.abc import Callable
from typing import NamedTuple

from quire.core.scheduler import Scheduler
from quire.engine.limits.guess_costs import GuessCosts
from quire.engine.limits.restores import FIRST_LIMIT, FIRST_PAGES, CopiesBesideStep, CopiesInStep, in_blocks
from quire.engine.limits.step_times import Measured, StepKind, StepLoad, StepTimes
from quire.engine.observer import Observer, Step

MIN_PREFILL_SHARE = 32  # steps have at least this part of `max_batch_prefill_tokens` for prompts
MIN_PREFILL_TOKENS = 16
MIN_PAUSE, MAX_PAUSE = 64, 4096  # single steps before a burst is tried


class StepLimits(Observer):
    """Measures steps, and then decides what the next may hold. Each decision is a function of `times` and of what was
    decided before. Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, max_burst_s: float, max_step_s: float) -> None:
        """`max_burst_s`: the longest step in which sequences get several tokens. `max_step_s`: the longest step with
        prompts and decodes; 0 for no limit."""
        limits, budget = scheduler.limits, scheduler.budget
        self._limits, self._budget = limits, budget
        self._max_token_s = max_burst_s / limits.max_burst  # of a burst
        self._max_step_s = max_step_s
        self._bursts = Bursts()
        self._copies: CopiesInStep | CopiesBesideStep | None = None
        if limits.host_pages and limits.restores_ahead:
            self._copies = CopiesBesideStep(in_blocks(FIRST_PAGES, limits.max_page_restores))
        elif limits.host_pages:
            self._copies = CopiesInStep(min(FIRST_LIMIT, limits.max_page_restores))
        if self._copies is not None:
            budget.max_restores_beside_decodes = self._copies.num_pages
        guess_costs = GuessCosts(budget.padded, budget.fixed_tokens) if limits.max_guesses else None
        self.times = StepTimes(limits.restores_ahead, guess_costs)
        # The tokens of steps, ascending, that prompts are cut for: they change while programs are compiled.
        self.step_sizes: Callable[[], tuple[int, ...]] = lambda: budget.step_sizes

    def update_sizes(self) -> None:
        """Tell the scheduler the sizes of steps that there are now."""
        self._budget.step_sizes = self.step_sizes()

    def step_ended(self, step: Step) -> None:
        self.update_sizes()
        measured = self.times.measure(step)
        if measured is None:
            return
        if measured.load is not None and self._max_step_s:
            self._budget.max_prefill_beside_decodes = prompt_tokens_beside(
                self.times, measured.load, self._max_step_s, self._limits.max_batch_prefill_tokens
            )
        if self._limits.max_burst > 1:
            self._limit_bursts(measured.kind)
        if self._copies is not None:
            self._limit_restores(step, measured)
        if (costs := self.times.guess_costs) is not None:
            self._budget.fixed_tokens = costs.fixed_tokens
            self._budget.guessing_cost = costs.guessing_cost
            self._budget.size_costs = costs.size_costs

    def _limit_bursts(self, kind: StepKind) -> None:
        token_s = self.times.recent_s(kind)
        if token_s is None:
            return
        if kind is StepKind.BURST:
            self._bursts = self._bursts.after_burst(token_s, self._max_token_s)
            if not self._bursts.are_allowed:
                self.times.forget(StepKind.BURST)  # the next one is tried
        elif kind is StepKind.SINGLE:
            self._bursts = self._bursts.after_single(token_s, self._max_token_s)
        self._budget.burst = self._limits.max_burst if self._bursts.are_allowed else 1

    def _limit_restores(self, step: Step, measured: Measured) -> None:
        limits, num_restored = self._limits, measured.num_restored
        step_s = self.times.recent_s(measured.kind)
        if measured.kind in (StepKind.PROMPTS, StepKind.BURST) or step_s is None:
            return
        if isinstance(self._copies, CopiesBesideStep):
            self._copies = self._copies.after(
                num_restored,
                step.took_s,
                step.copies_waited_s,
                step_s,
                is_slowed=measured.is_slowed,
                row=len(limits.page_groups),
                most=limits.max_page_restores,
            )
        elif isinstance(self._copies, CopiesInStep) and num_restored and measured.kind is StepKind.SINGLE:
            compute_page_s = self.times.prompt_beside_s(limits.page_size)
            if compute_page_s is not None:
                compute_page_s /= len(limits.page_groups)  # each group has a page of the same tokens
            most = limits.max_page_restores
            self._copies = self._copies.after(num_restored, step.took_s, step_s, compute_page_s, most)
        assert self._copies is not None
        self._budget.max_restores_beside_decodes = self._copies.num_pages


def prompt_tokens_beside(times: StepTimes, load: StepLoad, max_step_s: float, most: int) -> int:
    """The tokens of prompts in a step beside decodes like those of `load`, so that it takes `max_step_s`.

    Prompts get a minimum share of each step, however long the decodes take. Steps far larger than any so far are
    approached by doubling.
    """
    least = min(most, max(MIN_PREFILL_TOKENS, most // MIN_PREFILL_SHARE))
    tokens = min(times.line.prefill_tokens_within(max_step_s, load), 2 * times.most_prompt_tokens, most)
    return max(least, int(tokens))


class Bursts(NamedTuple):
    """Allows bursts, by the times of those that ran.

    A new request waits for the bursts under way, and readers of a stream get the tokens of a burst together: so none
    may take longer than a limit. Bursts are judged by bursts, since a step of one token may take the host longer than
    the device. Once they take too long, they begin again when as many single steps would be short enough, and one is
    tried after a pause, which is twice as long after each that took too long again.
    """

    are_allowed: bool = True
    are_short: bool = False  # those of late were; else single steps decide, and the pause
    num_single: int = 0  # steps since the last burst
    pause: int = MIN_PAUSE

    def after_burst(self, token_s: float, limit_s: float) -> "Bursts":
        """`token_s`: the mean time of a token in bursts. `limit_s`: the most that it may take."""
        if token_s <= limit_s:
            return Bursts(are_short=True)
        return Bursts(are_allowed=False, pause=min(2 * self.pause, MAX_PAUSE))

    def after_single(self, token_s: float, limit_s: float) -> "Bursts":
        """`token_s`: the mean time of single steps."""
        num_single = self.num_single + 1
        are_allowed = self.are_allowed if self.are_short else token_s <= limit_s or num_single >= self.pause
        return self._replace(are_allowed=are_allowed, num_single=num_single)
