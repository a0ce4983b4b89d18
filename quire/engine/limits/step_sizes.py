"""Tells the scheduler the sizes of steps that prompts are cut for."""

from collections.abc import Callable

from quire.core.scheduler import Scheduler
from quire.engine.observer import Observer, Step


class StepSizes(Observer):
    """Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, sizes: Callable[[], tuple[int, ...]]) -> None:
        """`sizes`: the tokens of steps, as programs are there; they change while others are compiled."""
        self._budget = scheduler.budget
        self._sizes = sizes

    def step_ended(self, step: Step) -> None:
        self.update()

    def update(self) -> None:
        self._budget.step_sizes = self._sizes()
