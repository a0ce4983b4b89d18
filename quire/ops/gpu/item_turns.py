"""The turns by which workers of a kernel take items from a list, and fetch the blocks of each, for Mosaic."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

PROGRAMS = 132  # where no device says how many multiprocessors it has


def num_programs() -> int:
    """One for each multiprocessor."""
    return getattr(jax.devices()[0], "core_count", None) or PROGRAMS


class HasBlocks(Protocol):
    @property
    def num_blocks(self) -> Any: ...


Item = TypeVar("Item", bound=HasBlocks)


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


class Cursor(NamedTuple, Generic[Item]):
    """A worker's next block that is to be fetched."""

    turn: Any
    block: Any  # of the item
    fetched: Any  # blocks
    item: Item
    next_item: Item  # known early: it takes long to read
    pages: tuple[Any, ...]

    @classmethod
    def begin(cls, work: ItemTurns[Item], pages_of: Callable[[Item, Any], tuple[Any, ...]]) -> "Cursor[Item]":
        first, zero = work.item(jnp.int32(0)), jnp.int32(0)
        return cls(zero, zero, zero, first, work.item(jnp.int32(1)), pages_of(first, zero))

    def next(self, work: ItemTurns[Item], pages_of: Callable[[Item, Any], tuple[Any, ...]]) -> "Cursor[Item]":
        turn, block, fetched, item, next_item, _ = self

        def following() -> Cursor[Item]:
            after, zero = work.item(turn + 2), jnp.int32(0)
            return Cursor(turn + 1, zero, fetched + 1, next_item, after, pages_of(next_item, zero))

        def same() -> Cursor[Item]:
            return Cursor(turn, block + 1, fetched + 1, item, next_item, pages_of(item, block + 1))

        found: Cursor[Item] = lax.cond(block + 1 >= item.num_blocks, following, same)
        return found
