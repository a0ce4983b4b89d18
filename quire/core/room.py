"""How much of what a step may hold it does hold."""

from quire.core.limits import Limits
from quire.core.plan import Kind, StepPlan

GROW_STEPS = 512  # without trouble, before twice as much is tried again


class Room:
    """The budgets of a step: those of the limits, and less for a while after the device has run out of memory.

    Owned by the scheduler.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_prefill_tokens = self.prefill_tokens = limits.max_batch_prefill_tokens
        self._max_rows = self.rows = limits.max_batch_size
        self._steps_left = 0  # until it grows

    @property
    def is_whole(self) -> bool:
        return self.prefill_tokens == self._max_prefill_tokens and self.rows == self._max_rows

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
