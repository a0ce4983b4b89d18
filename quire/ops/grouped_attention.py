"""Attention of groups of queries over pages, at the cost of the contexts that are in use.

A group is one or more consecutive positions of one sequence: a decode is a group of one, a prefill is cut into groups
of a fixed size. Every group reads its sequence's keys and values once for all its queries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.attention_reference import MASKED, softcapped
from quire.ops.attention_spec import AttentionSpec

SPAN = 128  # positions read at a time


class Groups(NamedTuple):
    """Where the queries of each group stand. A group of length 0 is padding and comes out as zeros."""

    page_table: jax.Array  # [n, width]; what lies beyond a context may name any page
    starts: jax.Array  # [n], position of the first query
    lengths: jax.Array  # [n], how many of the group's queries are real


def grouped_attention(
    spec: AttentionSpec, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, groups: Groups
) -> jax.Array:
    """Attention of q [n, b, k, g, h]; [n, b, k, g, h]. Plain jnp, and as exact as the reference.

    The softmax is accumulated over spans of the context, as many as the longest context needs.
    """
    n, b, heads, group, size = q.shape
    page_size = k_pages.shape[1]
    pages_per_span = max(1, min(SPAN // page_size, groups.page_table.shape[1]))
    span = pages_per_span * page_size
    table = _padded(groups.page_table, pages_per_span)
    positions = groups.starts[:, None] + jnp.arange(b)  # [n, b]
    real = jnp.arange(b) < groups.lengths[:, None]
    ends = jnp.where(groups.lengths > 0, groups.starts + groups.lengths, 0)
    first: jax.Array | int = 0
    if spec.window is not None:
        earliest = jnp.where(groups.lengths > 0, groups.starts - spec.window + 1, jnp.max(ends))
        first = jnp.maximum(jnp.min(earliest), 0) // span

    def read(index: jax.Array, so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, out = so_far
        pages = jax.lax.dynamic_slice_in_dim(table, index * pages_per_span, pages_per_span, axis=1)
        keys = k_pages[pages].reshape(n, span, heads, size)
        values = v_pages[pages].reshape(n, span, heads, size)
        at = index * span + jnp.arange(span)
        seen = real[:, :, None] & (at <= positions[:, :, None])  # [n, b, s]
        if spec.window is not None:
            seen &= at > positions[:, :, None] - spec.window
        scores = softcapped(spec, jnp.einsum("nbkgh,nskh->nbkgs", q, keys, preferred_element_type=jnp.float32))
        scores = jnp.where(seen[:, :, None, None, :], scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        weights = jnp.where(seen[:, :, None, None, :], jnp.exp(scores - new_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - new_highest)
        # A weight of zero does not silence a NaN, so values that nobody sees are zero themselves.
        values = jnp.where((at < ends[:, None])[:, :, None, None], values, 0)
        part = jnp.einsum("nbkgs,nskh->nbkgh", weights.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return new_highest, total * shrink + weights.sum(axis=-1), out * shrink[..., None] + part

    shape = (n, b, heads, group)
    nothing = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32)
    num_spans = (jnp.max(ends) + span - 1) // span
    _, total, out = jax.lax.fori_loop(first, num_spans, read, nothing)
    result: jax.Array = (out / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
    return result


def _padded(table: jax.Array, multiple: int) -> jax.Array:
    missing = -table.shape[1] % multiple
    return jnp.pad(table, ((0, 0), (0, missing))) if missing else table
