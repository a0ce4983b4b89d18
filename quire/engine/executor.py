"""What the engine asks of whatever computes its steps."""

from collections.abc import Iterator
from typing import Protocol

from quire.core.plan import StepPlan, StepResult


class Pending(Protocol):
    """A step under way."""

    def sample(self, masks: dict[int, bytes]) -> None:
        """Go on, of a plan with guided chunks: by index of the chunk, which tokens may be sampled, a bit for each, in
        little-endian words of 32. Guided chunks without a mask may sample anything. Returns at once."""

    def result(self) -> StepResult:
        """Wait for the step; raise what it failed with."""


class Executor(Protocol):
    """Computes steps in the order they are submitted. Used from the engine thread alone."""

    def submit(self, plan: StepPlan) -> Pending:
        """Launch a step and return at once. A plan with guided chunks waits before it samples until `Pending.sample`;
        no other is submitted meanwhile."""

    def reset(self) -> None:
        """Rebuild the device state after a failed step, which may have consumed it. Every slot and page is empty."""

    def check_device(self) -> None:
        """Compute something tiny on every device and wait for it; raise where that fails. No step is under way."""

    def warm_up(self) -> Iterator[float]:
        """Prepare every shape of step there can be, telling the share done, from 0 to 1."""

    def close(self) -> None: ...


def is_out_of_memory(fault: Exception) -> bool:
    """Whether the device had too little memory for a step, as XLA says it."""
    return "RESOURCE_EXHAUSTED" in str(fault)
