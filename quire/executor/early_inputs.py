"""Integers of programs that go to the device before the pages that a plan fetches."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from quire.core.plan import Place, StepPlan, Tier
from quire.sharding import put


class EarlyInputs:
    """Sends the packed integers of a plan's programs, where the plan fetches pages that its chunks do not read.

    A device copies one thing at a time from the host. What a program takes would come after blocks of pages that it
    does not need, if it were sent with the call. Owned by the executor.
    """

    def __init__(self, where: Sharding | None) -> None:
        """`where`: the place of integers on the devices."""
        self._where = where
        self.is_needed = False

    def begin(self, plan: StepPlan) -> None:
        fetched = {copy.target for copy in plan.copies if copy.source.tier is Tier.HOST}
        read = places_read(plan) if fetched else None
        self.is_needed = read is not None and read.isdisjoint(fetched)

    def send(self, packed: Any) -> Any:
        """The integers as a program takes them: on their way to the device, or as they are. They do not change."""
        return put(packed, self._where) if self.is_needed else packed

    def send_all(self, packed: Sequence[Any]) -> list[jax.Array]:
        """All of them on their way, whether that is needed or not."""
        return [put(one, self._where) for one in packed]


def places_read(plan: StepPlan) -> set[Place] | None:
    """The pages that chunks have from this plan on; None for all pages, if there are no chunks that wait for them."""
    if not plan.chunks:
        return None
    return {Place(Tier.DEVICE, page) for chunk in plan.chunks for table in chunk.new_pages for page in table}
