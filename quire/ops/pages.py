"""Keys and values in pages, and the tokens of a step that read and write them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

Pages = tuple[jax.Array, jax.Array]  # keys and values, [num_pages, page_size, k, h] each
TILE = 32  # tokens of a prefill that read the cache together, at most


class KVWriteTargets(NamedTuple):
    """The places of each token's keys and values. Padding goes to page 0, which is never read."""

    pages: jax.Array  # [t]
    offsets: jax.Array  # [t], within the page


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The queries of a step, cut into runs of consecutive positions of one sequence; [n] each.

    The first `num_single` tiles have one token at most, and tile i of them is token i: decodes. The others, of
    prefills, have TILE tokens at most. A tile of length 0 is padding. Tiles cover the tokens of a step from the first
    one on without gaps; the tokens behind them are padding, and attention may return anything for those.
    """

    slots: jax.Array
    starts: jax.Array  # position of the first token
    lengths: jax.Array
    offsets: jax.Array  # of the first token among the tokens of the step
    num_single: int = field(metadata={"static": True})

    @classmethod
    def single(cls, slots: jax.Array, positions: jax.Array) -> "Tiles":
        """One token of each of these slots; a negative position is padding."""
        count = len(slots)
        lengths = (positions >= 0).astype(jnp.int32)
        return cls(slots, jnp.maximum(positions, 0), lengths, jnp.arange(count, dtype=jnp.int32), count)

    def __len__(self) -> int:
        return len(self.slots)

    def part(self, first: int, end: int) -> "Tiles":
        return Tiles(
            self.slots[first:end],
            self.starts[first:end],
            self.lengths[first:end],
            self.offsets[first:end],
            num_single=max(0, min(end, self.num_single) - first),
        )


class Segments(NamedTuple):
    """Sequences that are computed from their first position on, [m] each; length -1 and offset -1 for padding."""

    offsets: jax.Array  # of the first token among the tokens of the step
    lengths: jax.Array


class PageAccess(NamedTuple):
    """The places that a step's tokens read and write in the pages of one group.

    Position p of slot s is at offset `p % page_size` of page `page_table[s, p // page_size]`. Entries of the table
    beyond a context or behind a window may name any page, and positions that no token sees may hold anything, NaN
    included.
    """

    targets: KVWriteTargets
    page_table: jax.Array  # [slots + 1, max_pages]
    tiles: Tiles
    segments: Segments | None = None  # where the step consists of new sequences alone


def write_targets(page_table: jax.Array, slots: jax.Array, positions: jax.Array, page_size: int) -> KVWriteTargets:
    """The write targets of tokens [t] at these positions; negative ones are padding."""
    at = jnp.maximum(positions, 0)
    pages = jnp.where(positions < 0, 0, page_table[slots, at // page_size])
    return KVWriteTargets(pages, at % page_size)
