"""Attention in a few lines of jnp: the oracle for every other implementation, and what runs where there is none."""

import jax
import jax.numpy as jnp

from quire.ops.attention_spec import AttentionSpec
from quire.ops.pages import PagedBatch

# Below every score, yet finite: a row that sees nothing gets equal weights over values that are all zero, not NaN.
MASKED = -1e30


def paged_attention(
    spec: AttentionSpec, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: PagedBatch
) -> jax.Array:
    """Attention of q [t, k, g, h] over the pages its rows hold; [t, k, g, h].

    The cost is proportional to the width of the page table, so callers give one no wider than the longest context.
    """
    page_size = k_pages.shape[1]
    pages = batch.page_table[batch.row_of_token]  # [t, max_pages]
    tokens, width = pages.shape
    keys = k_pages[pages].reshape(tokens, width * page_size, spec.kv_heads, spec.head_dim)
    values = v_pages[pages].reshape(keys.shape)
    context = batch.context_lengths[batch.row_of_token]
    seen = visible(spec, batch.positions, jnp.arange(width * page_size), context)
    scores = softcapped(spec, jnp.einsum("tkgh,tskh->tkgs", q, keys, preferred_element_type=jnp.float32))
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, MASKED), axis=-1)
    # A weight of zero does not silence a NaN, so what is not seen is zero itself.
    values = jnp.where(seen[:, :, None, None], values, 0)
    out = jnp.einsum("tkgs,tskh->tkgh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def causal_attention(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of q [t, k, g, h] over the keys and values [t, k, h] of the same t positions, from the first on."""
    positions = jnp.arange(q.shape[0])
    seen = visible(spec, positions, positions, positions + 1)  # [t, s]
    scores = softcapped(spec, jnp.einsum("tkgh,skh->tkgs", q, k, preferred_element_type=jnp.float32))
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, MASKED), axis=-1)
    out = jnp.einsum("tkgs,skh->tkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def visible(spec: AttentionSpec, positions: jax.Array, key_positions: jax.Array, context: jax.Array) -> jax.Array:
    """Which keys [s] each token [t] sees; [t, s]."""
    query = positions[:, None]
    seen = (key_positions <= query) & (key_positions < context[:, None])
    if spec.window is not None:
        seen &= key_positions > query - spec.window
    return seen


def softcapped(spec: AttentionSpec, products: jax.Array) -> jax.Array:
    scores = products * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    return scores
