"""Attention as models call it, and its reference: within one sequence, in a few lines of jnp."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from quire.ops.attention.heads import Heads
from quire.ops.attention.spec import AttentionSpec
from quire.ops.weights.rounded_rows import Rows, scaled

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


# attend(spec, heads, state) -> (out [t, k, g, h], state); the last axis is `value_dim` where the spec has one. Without
# that, `out` may be rows [t, k * g * h] that have codes.
Attend = Callable[[AttentionSpec, Heads, Any], tuple[Rows, Any]]


def whole_sequence(spec: AttentionSpec, heads: Heads, state: None) -> tuple[jax.Array, None]:
    """Attention within one sequence that is computed from its first token on, in one go; there is no state."""
    if spec.value_dim is not None:
        qk = scaled(heads.qkv)
        q, k = qk[:, :, :-1], qk[:, :, -1]
        return causal_attention(spec, q, k, k)[..., : spec.value_dim], state
    return causal_attention(spec, *heads.finished(), heads.sinks), state
