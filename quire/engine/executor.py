"""What the engine asks of whatever computes its steps."""

from collections.abc import Iterator
from typing import Protocol

from quire.core.plan import StepPlan, StepResult


class Pending(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for the step; raise what it failed with."""


class Executor(Protocol):
    """Computes steps in the order they are submitted. Used from the engine thread alone."""

    def submit(self, plan: StepPlan) -> Pending:
        """Launch a step and return at once."""

    def reset(self) -> None:
        """Rebuild the device state after a failed step, which may have consumed it. Every slot and page is empty."""

    def warm_up(self) -> Iterator[float]:
        """Prepare every shape of step there can be, telling the share done, from 0 to 1."""

    def close(self) -> None: ...
