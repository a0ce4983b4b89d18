"""The rotation of features by which tokens know their positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rotation(NamedTuple):
    """The rotation of each token, [t, rotated / 2] each."""

    cos: jax.Array
    sin: jax.Array


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """x [t, ..., h] with its features i and i + rotated / 2 rotated as a pair."""
    between = (1,) * (x.ndim - 2)
    cos = rotation.cos.reshape(len(x), *between, -1)
    sin = rotation.sin.reshape(len(x), *between, -1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate((*(part.astype(x.dtype) for part in rotated), rest), axis=-1)
