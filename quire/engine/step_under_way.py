"""A step between its launch and its result."""

from typing import NamedTuple

from quire.core.plan import StepPlan, StepResult
from quire.engine.executor import Pending


class StepUnderWay(NamedTuple):
    plan: StepPlan
    pending: Pending
    begun_s: float  # when it was planned; 0 where nothing is timed


class NotLaunched:
    """Stands in line for a step that could not be launched, so that faults are met in the order of the steps."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def sample(self, masks: dict[int, bytes]) -> None:
        pass

    def result(self) -> StepResult:
        raise self._error
