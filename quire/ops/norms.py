"""Norms of rows, computed in float32."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.weights.deferred import VisitSums

# (x, weight, eps, offset) -> x over the root mean square of as many of its last axes as the weight has, times
# `offset + weight`.
RMSNormOp = Callable[[jax.Array, jax.Array, float, float], jax.Array]
# (x, addend, weight, eps, offset) -> x + addend, both [t, d], and the RMS norm of that sum.
AddRMSNormOp = Callable[[jax.Array, jax.Array, jax.Array, float, float], tuple[jax.Array, jax.Array]]
# The same of the sums of experts.
AddVisitsNormOp = Callable[[jax.Array, VisitSums, jax.Array, float, float], tuple[jax.Array, jax.Array]]
# (x, weight, bias, eps) -> x [t, d] less its mean, over its standard deviation, times the weight, plus the bias.
LayerNormOp = Callable[[jax.Array, jax.Array, jax.Array, float], jax.Array]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """An RMSNormOp in plain jnp."""
    x32 = x.astype(jnp.float32)
    axes = tuple(range(x.ndim - weight.ndim, x.ndim))
    normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + eps)
    return (normal * (weight.astype(jnp.float32) + offset)).astype(x.dtype)


def add_rms_norm(
    x: jax.Array, addend: jax.Array, weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """An AddRMSNormOp in plain jnp."""
    total = x + addend
    return total, rms_norm(total, weight, eps, offset)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """A LayerNormOp in plain jnp."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normal * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class Norms(NamedTuple):
    """The norms of a platform."""

    rms: RMSNormOp = rms_norm
    add_rms: AddRMSNormOp = add_rms_norm
    layer: LayerNormOp = layer_norm
    add_visits_rms: AddVisitsNormOp | None = None  # None: the outputs of experts are added up before


PLAIN = Norms()
