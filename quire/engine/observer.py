"""Notifications about steps."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from quire.core.plan import StepPlan
from quire.core.stats import Blocker
from quire.engine.executor import NOT_LAUNCHED, Pending

log = logging.getLogger(__name__)

PREFILL, DECODE = "prefill", "decode"
P = ParamSpec("P")
T = TypeVar("T")


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
    """Is notified of the engine's steps, on the engine thread. The methods of this class do nothing.

    It measures, logs, traces or limits, and cannot end the engine: one that raises is `detached`.
    """

    def step_launched(self, step: Step) -> None:
        """The step is planned, and is handed to the executor next."""

    def step_ended(self, step: Step) -> None:
        """The result of the oldest step under way has arrived, or the step has failed with `step.error`."""

    def steps_discarded(self, steps: Sequence[Step]) -> None:
        """The steps behind one that failed. They get no result."""

    def step_delivered(self, step: Step) -> None:
        """The step's tokens are on their way to the front ends."""

    def detached(self) -> None:
        """It has raised, and hears of no step any more: what it tells of them must not mislead."""


class Judge(ABC):
    """Decides whether the engine goes on after a step, on the engine thread. It is no `Observer`: what it raises ends
    the engine."""

    @abstractmethod
    def step_ended(self, step: Step) -> None:
        """As that of an observer, all of which have been notified."""


class Observers:
    """Notifies observers. The first error of one is logged with its name, and it is called no more. Owned by the engine
    thread."""

    def __init__(self) -> None:
        self._attached: list[Observer] = []

    def attach(self, observer: Observer) -> None:
        self._attached.append(observer)

    def detach(self, observer: Observer) -> None:
        self._attached = [attached for attached in self._attached if attached is not observer]

    def __iter__(self) -> Iterator[Observer]:
        return iter(list(self._attached))

    def is_attached(self, observer: Observer) -> bool:
        return any(attached is observer for attached in self._attached)

    def step_launched(self, step: Step) -> None:
        for observer in self._attached:
            self.call(observer, observer.step_launched, step)

    def step_ended(self, step: Step) -> None:
        for observer in self._attached:
            self.call(observer, observer.step_ended, step)

    def steps_discarded(self, steps: Sequence[Step]) -> None:
        for observer in self._attached:
            self.call(observer, observer.steps_discarded, steps)

    def step_delivered(self, step: Step) -> None:
        for observer in self._attached:
            self.call(observer, observer.step_delivered, step)

    def call(self, observer: Observer, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of a method of `observer`; None if it raises, or is detached."""
        if not self.is_attached(observer):
            return None
        try:
            return method(*args, **kwargs)
        except Exception:  # of any kind: no token depends on it
            log.exception("%s has failed and is detached; the engine goes on without it", type(observer).__name__)
            self.detach(observer)
        try:
            observer.detached()
        except Exception:  # as above
            log.exception("%s has failed when it was detached", type(observer).__name__)
        return None
