"""Attention within one sequence in a few lines of jnp: the oracle for every other implementation."""

import jax
import jax.numpy as jnp

from quire.ops.attention.spec import AttentionSpec

# Below every score, yet finite: a row that sees nothing gets equal weights over values that are all zero, not NaN.
MASKED = -1e30


def causal_attention(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
) -> jax.Array:
    """Attention of q [t, k, g, h] over the keys and values [t, k, h] of the same t positions, from the first on.

    `sinks` [k, g] are the scores that take a part of the softmax and have no value.
    """
    positions = jnp.arange(q.shape[0])
    seen = positions <= positions[:, None]  # [t, s]
    seen &= positions >= spec.first_seen(positions)[:, None]
    scores = softcapped(spec, jnp.einsum("tkgh,skh->tkgs", q, k, preferred_element_type=jnp.float32))
    scores = jnp.where(seen[:, None, None, :], scores, MASKED)
    if sinks is not None:
        each = jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate((scores, each), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)]
    out = jnp.einsum("tkgs,skh->tkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def softcapped(spec: AttentionSpec, products: jax.Array) -> jax.Array:
    scores = products * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    return scores
