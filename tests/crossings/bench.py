"""The places where sets of capabilities are crossed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.limits import Limits
from quire.core.plan import StepPlan
from quire.engine.engine import Engine
from quire.request import Request
from tests.crossings.engine_setup import EngineSetup
from tests.crossings.front_end import Answer

Fault = Callable[[StepPlan, list[tuple[int, ...]]], None]  # of a plan and the prompt of each of its rows


@dataclass
class Faults:
    """What is called before steps, and may raise."""

    before_submit: list[Fault] = field(default_factory=list)
    before_result: list[Fault] = field(default_factory=list)

    def at_submit(self, plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        for fault in self.before_submit:
            fault(plan, prompts)

    def at_result(self, plan: StepPlan, prompts: list[tuple[int, ...]]) -> None:
        for fault in self.before_result:
            fault(plan, prompts)


class Bench(Protocol):
    replacement: str  # the folder of another adapter, as clients name it

    def limits(self, setup: EngineSetup) -> Limits: ...

    def engine(self, setup: EngineSetup, clock: Callable[[], float], faults: Faults) -> Engine:
        """An engine in which nothing has run."""

    def between_turns(self) -> None:
        """What other threads do while the driver waits."""

    def translated(self, request: Request) -> Request:
        """The request with grammars and ends that the bench's models have."""

    def expected(self, setup: EngineSetup, request: Request, sample: int, folder: str | None) -> Answer:
        """The answer of the plain run. `folder`: that of its adapter."""

    def check_answer(self, request: Request, sample: int, found: Answer, expected: Answer) -> None:
        """Assert that log-probabilities and end are right. Tokens are. Those of the prompt are the first sample's."""

    def left_behind(self, engine: Engine) -> Iterator[str]:
        """What an engine at rest should not have any more, beside what its scheduler knows."""
