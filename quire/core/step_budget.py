"""The tokens and rows that a step may have."""

from bisect import bisect_left, bisect_right

from quire.core.limits import Limits
from quire.core.plan import StepPlan

GROW_STEPS = 512  # without a failure, before twice as much is tried again
FIXED_STEP_COST = 256  # of a step on a GPU, in tokens
DEFAULT_FIXED_TOKENS = 16.0  # before steps have been measured
WAIT_OF_DECODES = 48  # for the first tokens of prompts in their step, in tokens


class StepBudget:
    """Token and row budget of a step; halved after the device has run out of memory, and then grown again.

    Owned by the scheduler.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_step_tokens = limits.max_step_tokens
        self._max_prefill_tokens = self.prefill_tokens = limits.max_batch_prefill_tokens
        self._max_rows = self.rows = limits.max_batch_size
        self.decodes_singly = False  # no sequence gets several tokens in a step by bursts, guesses or forced tokens
        self.burst = limits.max_burst  # tokens for each decode of a step; the engine allows fewer where they take long
        self._max_restores = limits.max_page_restores
        self.max_restores_beside_decodes: int | None = None  # pages from the host, while sequences decode
        self.max_prefill_beside_decodes: int | None = None  # tokens of prompts in a step in which sequences decode
        # Tokens of a step, ascending, that the executor is good at; () if all are alike.
        self.step_sizes: tuple[int, ...] = ()
        # For the choice of guesses: the fixed cost of a step, in tokens; how many times as long as others a step with
        # guesses takes; and the numbers of tokens, ascending, that steps are padded to.
        self.fixed_tokens = DEFAULT_FIXED_TOKENS
        self.guessing_cost = 1.0
        self.padded_sizes: tuple[int, ...] = ()
        # In place of `guessing_cost`, by whether a step has guesses and the tokens it is padded to, once measured.
        self.size_costs: dict[tuple[bool, int], float] = {}
        self._steps_left = 0  # until it grows

    @property
    def is_whole(self) -> bool:
        is_full = self.prefill_tokens == self._max_prefill_tokens and self.rows == self._max_rows
        return is_full and not self.decodes_singly

    def prefill_beside(self, num_decodes: int) -> int:
        """The prompt tokens that fit into a step with this many decodes."""
        tokens = min(self._max_step_tokens - num_decodes, self.prefill_tokens)
        limit = self.max_prefill_beside_decodes
        if not num_decodes or limit is None or limit >= tokens:
            return tokens
        below = bisect_right(self.step_sizes, num_decodes + limit)
        room = self.step_sizes[below - 1] - num_decodes if below else 0
        return room if 2 * room >= limit else limit  # a good size is not worth more than half of a prompt's share

    def padded(self, num_tokens: int) -> int:
        """The tokens that a step of `num_tokens` computes, padding included."""
        above = bisect_left(self.padded_sizes, num_tokens)
        return self.padded_sizes[above] if above < len(self.padded_sizes) else num_tokens

    def cost(self, num_tokens: int, has_guesses: bool) -> float:
        """The tokens that take as long as a step of `num_tokens` without prompts."""
        padded = self.padded(num_tokens)
        ratio = self.size_costs.get((has_guesses, padded), self.guessing_cost if has_guesses else 1.0)
        return (self.fixed_tokens + padded) * ratio

    def restores(self, has_decodes: bool) -> int:
        """The pages that a step may copy from the host."""
        beside = self.max_restores_beside_decodes
        return self._max_restores if beside is None or not has_decodes else min(beside, self._max_restores)

    def excess(self, num_tokens: int, has_decodes: bool) -> int:
        """The prompt tokens that a step of `num_tokens` should leave to the next.

        They are those above a size of `step_sizes`, if the padding up to the next size would take longer than they do
        in the next step, which is one more if no sequence decodes.
        """
        above = bisect_left(self.step_sizes, num_tokens)
        if not 0 < above < len(self.step_sizes):
            return 0
        excess, padding = num_tokens - self.step_sizes[above - 1], self.step_sizes[above] - num_tokens
        return excess if padding > excess + (WAIT_OF_DECODES if has_decodes else FIXED_STEP_COST) else 0

    def shrink(self, plan: StepPlan) -> bool:
        """`plan` was too large: halve its largest part. False when it was as small as can be."""
        num_rows = len(plan.chunks)
        num_prefilled, num_decodes = sum(chunk.length for chunk in plan.prefills), num_rows - plan.num_prefills
        if num_prefilled > max(1, num_rows):
            self.prefill_tokens = max(1, min(self.prefill_tokens, num_prefilled) // 2)
        elif plan.num_tokens - num_prefilled > num_decodes and not self.decodes_singly:
            self.decodes_singly = True
        elif num_rows > 1:
            self.rows = max(1, min(self.rows, num_rows) // 2)
        else:
            return False
        self._steps_left = GROW_STEPS
        return True

    def note_step(self) -> None:
        """A step worked."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self.prefill_tokens = min(2 * self.prefill_tokens, self._max_prefill_tokens)
                self.rows = min(2 * self.rows, self._max_rows)
                self.decodes_singly = False
                self._steps_left = 0 if self.is_whole else GROW_STEPS
