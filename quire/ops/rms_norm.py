"""Division by the root mean square, computed in float32."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """x over the root mean square of as many of its last axes as the weight has, times `offset + weight`."""
    x32 = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - weight.ndim, x.ndim))
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)
    return (normal * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
