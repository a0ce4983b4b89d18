"""The observers that set the limits of steps."""

from collections.abc import Iterator

from quire.core.scheduler import Scheduler
from quire.engine.limits.guess_cost import GuessCost
from quire.engine.limits.restore_limit import RestoreLimit
from quire.engine.limits.restore_pace import RestorePace
from quire.engine.limits.step_time import BurstLimit, StepTimeLimit
from quire.engine.observer import Observer


def step_limits(scheduler: Scheduler, max_burst_s: float, max_step_s: float) -> Iterator[Observer]:
    """Those that this scheduler has a use for. Times are as the engine's."""
    limits = scheduler.limits
    if limits.max_burst > 1:
        yield BurstLimit(scheduler, max_burst_s)
    if limits.host_pages:
        yield RestorePace(scheduler) if limits.restores_ahead else RestoreLimit(scheduler)
    if limits.max_guesses:
        yield GuessCost(scheduler.budget)
    if max_step_s:
        yield StepTimeLimit(scheduler, max_step_s)
