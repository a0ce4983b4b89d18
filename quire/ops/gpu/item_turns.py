"""The turns by which workers of a kernel take items from a list, for Mosaic."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax

Item = TypeVar("Item")


class ItemTurns(NamedTuple, Generic[Item]):
    """The items of a worker: those of all heads, by turns, in one direction and back."""

    make: Callable[..., Item]  # of the fields of an entry, and a head
    worker: Any
    items_ref: Any  # [n, fields]
    count: Any  # items, of all heads
    heads: int
    num_workers: int

    @property
    def turns(self) -> Any:
        """Turns in which there is an item for it; of the last one, only some workers have one."""
        whole = lax.div(self.count, self.num_workers)
        return whole + (self._number(whole) < self.count).astype(jnp.int32)

    def item(self, turn: Any) -> Item:
        """Any entry of the list, if there is no item: of padding, if there is none at all."""
        number = jnp.maximum(jnp.minimum(self._number(turn), self.count - 1), 0)
        at = lax.div(number, self.heads)
        fields = (self.items_ref[at, field] for field in range(self.items_ref.shape[1]))
        return self.make(*fields, lax.rem(number, self.heads))

    def _number(self, turn: Any) -> Any:
        own = lax.select(lax.rem(turn, 2) == 0, self.worker, self.num_workers - 1 - self.worker)
        return turn * self.num_workers + own
