"""Keys and values in pages, and the map from the tokens of a step to them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PagedBatch(NamedTuple):
    """Where the tokens of a step stand, and where the keys and values of their sequences are.

    Position p of a row is at offset `p % page_size` of page `page_table[row, p // page_size]`. A token at a negative
    position is padding: it is written to page 0, sees nothing and comes out as zero. Entries of the table beyond a
    row's context may name any page, and positions that were never written may hold anything, NaN included.
    """

    page_table: jax.Array  # [rows, max_pages]
    row_of_token: jax.Array  # [tokens]
    positions: jax.Array  # [tokens]
    context_lengths: jax.Array  # [rows], the tokens of this step included


def write_pages(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, batch: PagedBatch
) -> tuple[jax.Array, jax.Array]:
    """The pages [num_pages, page_size, kv_heads, head_dim] with the keys and values [t, k, h] of this step in place."""
    page_size = k_pages.shape[1]
    position = jnp.maximum(batch.positions, 0)
    page = batch.page_table[batch.row_of_token, position // page_size]
    page = jnp.where(batch.positions < 0, 0, page)
    offset = position % page_size
    k_pages = k_pages.at[page, offset].set(k.astype(k_pages.dtype))
    v_pages = v_pages.at[page, offset].set(v.astype(v_pages.dtype))
    return k_pages, v_pages
