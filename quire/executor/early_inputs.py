"""Integers of programs that go to the device before the pages that a plan fetches."""

from typing import Any

import jax
from jax.sharding import Sharding

from quire.core.plan import StepPlan, Tier
from quire.sharding import put


class EarlyInputs:
    """Sends the packed integers of a plan's programs, where the plan fetches pages from the host.

    A device copies one thing at a time from the host. What a program takes would come after blocks of pages that it
    does not need, if it were sent with the call. Owned by the executor.
    """

    def __init__(self, where: Sharding | None) -> None:
        """`where`: the place of integers on the devices."""
        self._where = where
        self._is_needed = False

    def begin(self, plan: StepPlan) -> None:
        self._is_needed = any(copy.source.tier is Tier.HOST for copy in plan.copies)

    def send(self, packed: Any) -> "Any | jax.Array":
        """The integers as a program takes them: on their way to the device, or as they are. They do not change."""
        return put(packed, self._where) if self._is_needed else packed
