"""Attention of tiles of queries over pages, at the cost of the contexts that are in use.

A tile is one or more consecutive positions of one sequence: a decode is a tile of one, a prefill is cut into tiles.
Each tile reads its sequence's keys and values once for all its queries.
"""

import jax
import jax.numpy as jnp

from quire.ops.attention.reference import MASKED, softcapped
from quire.ops.pages import TILE, PagedContext, read_pages

SPAN = 128  # positions read at a time


def tiled_attention(q: jax.Array, context: PagedContext) -> jax.Array:
    """Attention of q [t, k, g, h]; [t, k, g, h], zero for padding. Plain jnp, and as exact as the reference."""
    out = jnp.zeros_like(q)
    count, all_tiles = context.tiles.num_single, len(context.tiles)
    for part, size in ((context.part(0, count), 1), (context.part(count, all_tiles), TILE)):
        tiles = part.tiles
        if len(tiles):
            at = tiles.offsets[:, None] + jnp.arange(size)  # [n, b]
            queries = q[jnp.minimum(at, len(q) - 1)]
            real = jnp.arange(size) < tiles.lengths[:, None]
            results = _attend(queries, part)
            out = out.at[jnp.where(real, at, len(q))].set(results, mode="drop")
    return out


def _attend(q: jax.Array, context: PagedContext) -> jax.Array:
    """Attention of q [n, b, k, g, h]. The softmax is accumulated over spans, as many as the longest context needs."""
    spec, pages, page_table, tiles = context.spec, context.pages, context.page_table, context.tiles
    n, b, heads, group, size = q.shape
    page_size = pages[0].shape[1]
    pages_per_span = max(1, min(SPAN // page_size, page_table.shape[1]))
    span = pages_per_span * page_size
    table = _padded(page_table[tiles.slots], pages_per_span)
    positions = tiles.starts[:, None] + jnp.arange(b)  # [n, b]
    real = jnp.arange(b) < tiles.lengths[:, None]
    ends = jnp.where(tiles.lengths > 0, tiles.starts + tiles.lengths, 0)
    begins = spec.first_seen(tiles.starts)  # positions before these are seen by no query of the tile
    first: jax.Array | int = 0
    if not spec.sees_all:
        first = jnp.min(jnp.where(tiles.lengths > 0, begins, jnp.max(ends))) // span

    def read(index: jax.Array, so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, out = so_far
        there = jax.lax.dynamic_slice_in_dim(table, index * pages_per_span, pages_per_span, axis=1)
        keys, values = (part.reshape(n, span, heads, size) for part in read_pages(pages, there, q.dtype))
        at = index * span + jnp.arange(span)
        seen = real[:, :, None] & (at <= positions[:, :, None])  # [n, b, s]
        if not spec.sees_all:
            seen &= at >= spec.first_seen(positions)[:, :, None]
        scores = softcapped(spec, jnp.einsum("nbkgh,nskh->nbkgs", q, keys, preferred_element_type=jnp.float32))
        scores = jnp.where(seen[:, :, None, None, :], scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        weights = jnp.where(seen[:, :, None, None, :], jnp.exp(scores - new_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - new_highest)
        # A weight of zero does not silence a NaN, so values that no query sees are zero themselves.
        is_read = (at >= begins[:, None]) & (at < ends[:, None])
        values = jnp.where(is_read[:, :, None, None], values, 0)
        part = jnp.einsum("nbkgs,nskh->nbkgh", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return new_highest, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + part

    shape = (n, b, heads, group)
    nothing = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32)
    if context.sinks is not None:  # a first score, without a value
        nothing = jnp.broadcast_to(context.sinks.astype(jnp.float32), shape), jnp.ones(shape, jnp.float32), nothing[2]
    num_spans = (jnp.max(ends) + span - 1) // span
    _, total, out = jax.lax.fori_loop(first, num_spans, read, nothing)
    result: jax.Array = (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
    return result


def _padded(table: jax.Array, multiple: int) -> jax.Array:
    missing = -table.shape[1] % multiple
    return jnp.pad(table, ((0, 0), (0, missing))) if missing else table
