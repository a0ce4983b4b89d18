"""Workers of a Mosaic kernel take items from a list in turn, and fetch the blocks of each."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from quire.ops.gpu.hopper.mosaic import MULTIPROCESSORS


def num_programs() -> int:
    """Number of SMs; 132 without a GPU."""
    return getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


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
        """Turns in which this worker has an item; in the last turn, only some workers have one."""
        whole = lax.div(self.count, self.num_workers)
        return whole + (self._number(whole) < self.count).astype(jnp.int32)

    def item(self, turn: Any) -> Item:
        """The item of a turn; any entry of the list if the worker has none in that turn."""
        number = jnp.maximum(jnp.minimum(self._number(turn), self.count - 1), 0)
        at = lax.div(number, self.heads)
        fields = (self.items_ref[at, field] for field in range(self.items_ref.shape[1]))
        return self.make(*fields, lax.rem(number, self.heads))

    def _number(self, turn: Any) -> Any:
        own = lax.select(lax.rem(turn, 2) == 0, self.worker, self.num_workers - 1 - self.worker)
        return turn * self.num_workers + own


def fetch_blocks(
    work: ItemTurns[Item],
    pages_of: Callable[[Item, Any], tuple[Any, ...]],
    begin: Callable[[Any, Item], None],
    fetch: Callable[[Any, tuple[Any, ...], Item], None],
) -> None:
    """`begin` each item of a worker, by its turn, and `fetch` each of its blocks, by the number of those before it. The
    pages of a block and the fields of an item take long to read, and are read while those before are fetched. Each item
    has a block."""

    def fetch_item(turn: Any, state: tuple[Any, Item, tuple[Any, ...]]) -> tuple[Any, Item, tuple[Any, ...]]:
        fetched, item, first_pages = state
        next_item, count = work.item(turn + 1), item.num_blocks
        begin(turn, item)

        def fetch_block(block: Any, pages: tuple[Any, ...]) -> tuple[Any, ...]:
            is_last = block + 1 >= count
            following = jax.tree.map(lambda after, own: jnp.where(is_last, after, own), next_item, item)
            next_pages = pages_of(following, jnp.where(is_last, 0, block + 1))
            fetch(fetched + block, pages, item)
            return next_pages

        return fetched + count, next_item, lax.fori_loop(0, count, fetch_block, first_pages)

    first = work.item(jnp.int32(0))
    lax.fori_loop(0, work.turns, fetch_item, (jnp.int32(0), first, pages_of(first, jnp.int32(0))))
