"""The work of a kernel for decodes over pages of eight bits: parts of contexts, the longest first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.pages import PagedContext, Tiles, is_coded

BLOCK = 64  # positions that are computed at a time
COLUMNS = 8  # queries of a head, at most: the narrow side of the device's products
FEATURES = 128
LEAST_SCALES = 8  # of a page: the least that is copied at once is 16 bytes
# Positions of a part, by the least rows times heads of keys. With fewer, `decode_attention` is as fast.
PARTS = ((256, 512), (128, 256))


def part_of(q: jax.Array, context: PagedContext) -> int | None:
    """Positions of a part; None: the kernel is not for this."""
    spec, pages, rows = context.spec, context.pages, len(context.tiles)
    heads, group, size = q.shape[1:]
    page_size = pages[0].shape[1]
    has_codes = is_coded(pages[0].dtype) and q.dtype == jnp.bfloat16
    is_plain = spec.sees_all and spec.softcap is None and not spec.has_sinks
    fits = size == FEATURES and group <= COLUMNS and BLOCK % page_size == 0 and page_size >= LEAST_SCALES
    if not (has_codes and is_plain and fits):
        return None
    return next((part for least, part in PARTS if rows * heads >= least), None)


class Items(NamedTuple):
    """The list of work: parts of contexts, the longest first. Those behind the first `length` are not to be read."""

    # [n, 5]: token, slot, first position, the one after the last, and which part it is; -1: the whole
    fields: jax.Array
    length: jax.Array  # [1]
    parts: jax.Array  # [t]: of each token


def items_of(tiles: Tiles, part: int, max_parts: int) -> Items:
    """Of single tokens, each with parts of so many positions, or of a multiple."""
    ends = jnp.where(tiles.lengths > 0, tiles.starts + 1, 0)
    each = jnp.maximum(part * -(-ends // (part * max_parts)), 1)
    whole, rest = ends // each, ends % each
    tokens = jnp.arange(len(tiles))
    bounds = jnp.cumsum(whole)  # of each token's whole parts in the list
    is_before = (rest[:, None] > rest[None, :]) | (
        (rest[:, None] == rest[None, :]) & (tokens[:, None] < tokens[None, :])
    )
    by_rest = jnp.zeros_like(tokens).at[is_before.sum(axis=0)].set(tokens, unique_indices=True)  # the longest first
    number = jnp.arange(len(tiles) * max_parts)
    of_whole = jnp.minimum((bounds[None, :] <= number[:, None]).sum(axis=1), len(tiles) - 1)
    of_rest = by_rest[jnp.clip(number - bounds[-1], 0, len(tiles) - 1)]
    is_whole = number < bounds[-1]
    token = jnp.where(is_whole, of_whole, of_rest)
    index = jnp.where(is_whole, number - (bounds - whole)[token], whole[token])
    first = index * each[token]
    parts = whole + (rest > 0)
    fields = token, tiles.slots[token], first, jnp.minimum(first + each[token], ends[token])
    which = jnp.where(parts[token] == 1, -1, index)
    count = bounds[-1:] + (rest > 0).sum()
    return Items(jnp.stack([*fields, which], axis=1).astype(jnp.int32), count.astype(jnp.int32), parts)
