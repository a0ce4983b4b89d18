"""Division by the root mean square, computed in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Given x, what is to be added to it, both [t, d], and a norm's weight, eps and offset: the sum, and its norm.
AddNorm = Callable[[jax.Array, jax.Array, jax.Array, float, float], tuple[jax.Array, jax.Array]]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """x over the root mean square of as many of its last axes as the weight has, times `offset + weight`."""
    x32 = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - weight.ndim, x.ndim))
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)
    return (normal * (weight.astype(jnp.float32) + offset)).astype(x.dtype)


def add_norm(x: jax.Array, out: jax.Array, weight: jax.Array, eps: float, offset: float) -> tuple[jax.Array, jax.Array]:
    """An AddNorm. Plain jnp."""
    total = x + out
    return total, rms_norm(total, weight, eps, offset)
