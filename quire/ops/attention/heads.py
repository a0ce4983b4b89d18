"""Queries, keys and values on their way from a projection to attention."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.norms import RMSNormOp, rms_norm
from quire.ops.weights.rounded_rows import Sums, scaled


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadNorm:
    """An RMS norm of each head, or of all heads together where the weight is that of all."""

    weight: jax.Array  # [h]; or [k, g, h] of queries and [k, h] of keys
    eps: float = field(metadata={"static": True})
    offset: float = field(default=0.0, metadata={"static": True})

    def __call__(self, x: jax.Array, rms: RMSNormOp) -> jax.Array:
        return rms(x, self.weight, self.eps, self.offset)


class Heads(NamedTuple):
    """The heads of a layer as they were projected, with the norms and the rotation still to apply."""

    # [t, k, g + 2, h]: for each key its queries, itself and its value; [t, k, g + 1, h] where values are part of keys.
    qkv: Sums
    rotation: Rotation | None = None  # of queries and keys, after their norms
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    sinks: jax.Array | None = None  # [k, g], where the spec `has_sinks`: a score of each query head

    def finished(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [t, k, g, h], k [t, k, h] and v [t, k, h] with norms and rotation applied."""
        q, k, v = self._normal(rms_norm)
        if self.rotation is not None:
            q, k = rotate(q, self.rotation), rotate(k, self.rotation)
        return q, k, v

    def with_norms_done(self, rms: RMSNormOp) -> "Heads":
        """The same with norms applied, by `rms`; the rotation is still to apply."""
        if self.q_norm is None and self.k_norm is None:
            return self.with_scales_applied()
        return joined(*self._normal(rms))._replace(rotation=self.rotation, sinks=self.sinks)

    def with_scales_applied(self) -> "Heads":
        return self._replace(qkv=scaled(self.qkv))

    def _normal(self, rms: RMSNormOp) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = scaled(self.qkv)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        if self.q_norm is not None:
            q = self.q_norm(q, rms)
        if self.k_norm is not None:
            k = self.k_norm(k, rms)
        return q, k, v


def latent(q: jax.Array, k: jax.Array) -> Heads:
    """Finished heads whose values are a part of their keys."""
    return Heads(jnp.concatenate((q, k[:, :, None]), axis=2))


def joined(q: jax.Array, k: jax.Array, v: jax.Array) -> Heads:
    """Finished heads: no norm and no rotation is left to apply."""
    return Heads(jnp.concatenate((q, k[:, :, None], v[:, :, None]), axis=2))
