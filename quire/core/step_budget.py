"""The tokens and rows that a step may have."""

from quire.core.limits import Limits
from quire.core.plan import Kind, StepPlan

GROW_STEPS = 512  # without trouble, before twice as much is tried again


class StepBudget:
    """Token and row budget of a step; halved after the device has run out of memory, and then grown again.

    Owned by the scheduler.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_step_tokens = limits.max_step_tokens
        self._max_prefill_tokens = self.prefill_tokens = limits.max_batch_prefill_tokens
        self._max_rows = self.rows = limits.max_batch_size
        self.burst = limits.max_burst  # tokens for each decode of a step; the engine allows fewer where they take long
        self.max_prefill_beside_decodes: int | None = None  # tokens of prompts in a step in which sequences decode
        self._steps_left = 0  # until it grows

    @property
    def is_whole(self) -> bool:
        return self.prefill_tokens == self._max_prefill_tokens and self.rows == self._max_rows

    def prefill_beside(self, num_decodes: int) -> int:
        """The tokens of prompts that fit beside so many decodes."""
        tokens = min(self._max_step_tokens - num_decodes, self.prefill_tokens)
        if num_decodes and self.max_prefill_beside_decodes is not None:
            tokens = min(tokens, self.max_prefill_beside_decodes)
        return tokens

    def shrink(self, plan: StepPlan) -> bool:
        """`plan` was too much: halve what most of it was. False when it was as small as can be."""
        num_rows = len(plan.chunks)
        num_prefilled = sum(chunk.length for chunk in plan.chunks if chunk.kind is Kind.PREFILL)
        if num_prefilled > max(1, num_rows):
            self.prefill_tokens = max(1, min(self.prefill_tokens, num_prefilled) // 2)
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
                self._steps_left = 0 if self.is_whole else GROW_STEPS
