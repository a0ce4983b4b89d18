"""Notifications about steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.blocker import Blocker
from quire.core.plan import StepPlan
from quire.engine.executor import NOT_LAUNCHED, Pending

PREFILL, DECODE = "prefill", "decode"


@dataclass(slots=True)
class Step:
    """A step from its plan to its result. Times are in seconds of the engine's clock."""

    plan: StepPlan
    planned_s: float  # planning began
    launched_s: float  # planning ended
    blocked_by: Blocker | None = None  # the limit that kept the head of the queue waiting
    num_late: int = 0  # the executor's late compilations before this step
    pending: Pending = NOT_LAUNCHED
    error: Exception | None = None  # its error, if it failed
    ended_s: float = 0.0
    took_s: float = 0.0  # since its launch, or since the step before it ended
    copies_waited_s: float = 0.0  # of that, for copies of pages when all else was there
    completed_s: float = 0.0  # the scheduler has applied its result
    delivered_s: float = 0.0  # its tokens are on their way to the front ends
    waited_for_compiler: bool = False
    kind: str = field(init=False)  # a step is a prefill if it computes any part of a prompt
    num_prefill_tokens: int = field(init=False)
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        # Pages that come from the host are a part of a prompt too.
        self.kind = PREFILL if plan.num_prefills or not plan.chunks else DECODE
        self.num_prefill_tokens = sum([chunk.length for chunk in plan.prefills]) if plan.num_prefills else 0
        if plan.burst > 1 or plan.num_verified or plan.num_forced:  # more than a token for each decode
            self.num_tokens = plan.num_tokens
        else:
            self.num_tokens = plan.num_decodes + self.num_prefill_tokens


class Observer:
    """Is notified of the engine's steps, on the engine thread. The methods of this class do nothing."""

    def step_launched(self, step: Step) -> None:
        """The step is planned, and is handed to the executor next."""

    def step_ended(self, step: Step) -> None:
        """The result of the oldest step under way has arrived, or the step has failed with `step.error`."""

    def steps_discarded(self, steps: Sequence[Step]) -> None:
        """The steps behind one that failed. They get no result."""

    def step_delivered(self, step: Step) -> None:
        """The step's tokens are on their way to the front ends."""
