"""Keeps pages free before they are needed."""

from quire.core.limits import Limits
from quire.core.plan import Kind
from quire.core.running import Running
from quire.core.step_builder import StepBuilder

AT_ONCE = 16  # pages that a step evicts ahead; the host has them in blocks of so many
LONG_STEP_TOKENS = 512  # of prompts: beside so many there is time for all


class FreeAhead:
    """Evicts pages ahead of need, as many as one step restores at most, in steps that restore none.

    What is evicted has to be saved, and that takes time of the host which a step that restores has none of. Owned by
    the planner.
    """

    def __init__(self, limits: Limits, running: Running) -> None:
        self._num_kept = limits.pages_kept_free
        self._num_groups = len(limits.page_groups)  # pages that may leave together
        self._running = running

    def evict(self, step: StepBuilder) -> None:
        """`step` has all its pages."""
        missing = self._num_kept - self._running.pool.num_free
        if missing < min(AT_ONCE, -(-self._num_kept // 2)) or step.restored:
            return
        num_prompt_tokens = sum([chunk.length for chunk in step.chunks if chunk.kind is Kind.PREFILL])
        host = self._running.host
        assert host is not None
        most = missing if num_prompt_tokens >= LONG_STEP_TOKENS else AT_ONCE
        count = min(missing, most, host.num_saves_left - self._num_groups + 1)  # none is lost
        if count > 0:
            self._running.cache.evict(count)
