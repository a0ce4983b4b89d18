"""The work of a kernel for prefills over pages of eight bits: tiles or parts of them, the longest contexts first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.pages import TILE, PagedContext, Tiles, is_coded

BLOCK = 128  # positions that are computed at a time
FEATURES = 128
WIDE = 64  # rows of a group of threads: tokens times queries of a head
GROUPS = 2  # of threads that compute an item
LEAST_SCALES = 8  # of a page: the least that is copied at once is 16 bytes
MOST_QUERIES = 8  # of a head
# Of a step; with fewer, `prefill_attention` cuts long contexts into parts, so that all programs read.
LEAST_TOKENS = 512


class PrefillItems(NamedTuple):
    """The list of work. Entries behind the first `length` are padding."""

    fields: jax.Array  # [n, 4]: slot, first position, first token, number of tokens
    length: jax.Array  # [1]


def tokens_of_group(queries: int) -> int:
    """Tokens of a group of threads, for so many queries of a head: groups of an item divide a tile."""
    return 16 if queries <= 4 else 8


def fits(q: jax.Array, context: PagedContext) -> bool:
    """True if the kernel is for queries [t, k, g, h] of prefills."""
    spec, pages = context.spec, context.pages
    tokens, _, queries, size = q.shape
    page_size = pages[0].shape[1]
    has_codes = is_coded(pages[0].dtype) and q.dtype == jnp.bfloat16
    is_plain = spec.sees_all and spec.softcap is None and not spec.has_sinks
    is_cut = BLOCK % page_size == 0 and LEAST_SCALES <= page_size <= BLOCK // 2
    is_shaped = tokens >= LEAST_TOKENS and queries <= MOST_QUERIES and size == FEATURES
    return has_codes and is_plain and is_cut and is_shaped


def prefill_items(tiles: Tiles, tokens: int) -> PrefillItems:
    """Items of so many tokens at most."""
    first = jnp.arange(0, TILE, tokens)
    starts, offsets = ((field[:, None] + first).reshape(-1) for field in (tiles.starts, tiles.offsets))
    lengths = jnp.clip(tiles.lengths[:, None] - first, 0, tokens).reshape(-1)
    ends = jnp.where(lengths > 0, starts + lengths, 0)
    number = jnp.arange(len(ends))
    is_before = (ends[:, None] > ends[None, :]) | (
        (ends[:, None] == ends[None, :]) & (number[:, None] < number[None, :])
    )
    order = jnp.zeros_like(number).at[is_before.sum(axis=0)].set(number, unique_indices=True)
    fields = jnp.repeat(tiles.slots, len(first)), starts, offsets, lengths
    count = (lengths > 0).sum()[None]
    return PrefillItems(jnp.stack(fields, axis=1)[order].astype(jnp.int32), count.astype(jnp.int32))
