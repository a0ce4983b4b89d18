"""An engine that was built, and the programs that it still needs."""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.engine.building.deployment import Deployment
from quire.engine.engine import Engine
from quire.executor.executor import JaxExecutor


@dataclass(frozen=True)
class Built:
    deployment: Deployment
    engine: Engine
    executor: JaxExecutor

    def warm_up(self) -> Iterator[float]:
        """Compile the programs, telling the share done. Afterwards the scheduler knows the good sizes of steps. Where
        it is left off, the rest is done while the engine is idle, and prompts are cut for the programs that there
        are."""
        limits = self.engine.step_limits
        limits.step_sizes = lambda: self.executor.programs.step_sizes

        def warm_up_more() -> float | None:
            wait_s = self.executor.warm_up_more()
            limits.update_sizes()
            return wait_s

        self.engine.idle_work = warm_up_more
        yield from self.executor.warm_up()
        self.engine.idle_work = None
        limits.update_sizes()
