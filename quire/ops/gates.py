"""The gates of experts: functions of gates and ups in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]

tanh_gelu: Activation = partial(jax.nn.gelu, approximate=True)


@dataclass(frozen=True)
class PlainGate:
    """activation(gate) * up"""

    activation: Activation

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.activation(gate) * up


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) * gate * sigmoid(alpha * gate), with gates of at most `limit`, and ups at most so far from zero."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        return (jnp.clip(up, -self.limit, self.limit) + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


SILU = PlainGate(jax.nn.silu)
