"""An engine that was built, and the programs that it still needs."""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.core.step_budget import StepBudget
from quire.engine.deployment import Deployment
from quire.engine.engine import Engine
from quire.engine.observer import Observer, Step
from quire.executor.executor import JaxExecutor
from quire.executor.programs import Programs


class StepSizes(Observer):
    """Lets the scheduler cut prompts for the programs that there are. Owned by the engine thread."""

    def __init__(self, budget: StepBudget, programs: Programs) -> None:
        self._budget = budget
        self._programs = programs

    def step_ended(self, step: Step) -> None:
        self.update()

    def update(self) -> None:
        self._budget.step_sizes = self._programs.step_sizes


@dataclass(frozen=True)
class Built:
    deployment: Deployment
    engine: Engine
    executor: JaxExecutor

    def warm_up(self) -> Iterator[float]:
        """Compile the programs, telling the share done. Afterwards the scheduler knows the good sizes of steps. Where
        it is left off, the rest is done while the engine is idle, and prompts are cut for the programs that there
        are."""
        sizes = StepSizes(self.engine.scheduler.budget, self.executor.programs)
        self.engine.observe(sizes)

        def warm_up_more() -> float | None:
            wait_s = self.executor.warm_up_more()
            sizes.update()
            return wait_s

        self.engine.idle_work = warm_up_more
        yield from self.executor.warm_up()
        self.engine.idle_work = None
        sizes.update()
