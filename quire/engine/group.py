"""The interface of a group of processes that compute an engine's steps together."""

from collections.abc import Callable
from typing import Protocol

from quire.engine.observer import Judge, Step
from quire.errors import EngineFailed, reason_of


class Group(Protocol):
    """The other processes. None of them can be replaced: the engine ends with any of them, and another one begins."""

    on_lost: Callable[[str], None]  # called on some thread when one is lost: no request is to blame
    on_fault: Callable[[str], None]  # called on some thread when a step fails on one

    def check(self) -> None:
        """Return once every process has answered. Where one is lost, `on_lost` is called instead."""


class GroupFaults(Judge):
    """Ends an engine in which a step has failed: the states of its processes differ now. The loss of a process comes
    first, since requests are not to blame for it. Otherwise the next engine finds the request by the journal."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def step_ended(self, step: Step) -> None:
        if step.error is not None:
            self._group.check()
            raise EngineFailed(f"a step failed, and the group cannot continue: {reason_of(step.error)}")
