"""Pages between their arrays and blocks, in which the bytes of a page in all arrays are together."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class PageMoves(NamedTuple):
    """`gather` copies pages from arrays [pages, ...] of one shape and dtype into blocks [rows, arrays, ...]: the pages
    with these numbers [n], `rows` in each block, of which n is a multiple. `scatter` gives the arrays with the pages of
    blocks in places [n]; 0: nowhere. No place but 0 is given twice."""

    gather: Callable[[Sequence[jax.Array], jax.Array, int], list[jax.Array]]
    scatter: Callable[[Sequence[jax.Array], jax.Array, Sequence[jax.Array]], list[jax.Array]]


def gather(arrays: Sequence[jax.Array], sources: jax.Array, rows: int) -> list[jax.Array]:
    """Plain jnp."""
    stacked = jnp.stack([one[sources] for one in arrays], axis=1)
    return [stacked[begin : begin + rows] for begin in range(0, sources.shape[0], rows)]


def scatter(arrays: Sequence[jax.Array], targets: jax.Array, blocks: Sequence[jax.Array]) -> list[jax.Array]:
    """Plain jnp.

    What goes nowhere goes behind the last page, which writes nothing: many rows that write one page wait for each other
    on a GPU. So no page is written twice, which also writes them faster.
    """
    stacked = jnp.concatenate(list(blocks))
    behind = arrays[0].shape[0] + jnp.arange(targets.shape[0], dtype=targets.dtype)
    where = jnp.where(targets > 0, targets, behind)
    return [
        into.at[where].set(stacked[:, place], mode="drop", unique_indices=True) for place, into in enumerate(arrays)
    ]


PLAIN_MOVES = PageMoves(gather, scatter)
