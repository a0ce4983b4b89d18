"""Queries, keys and values on their way from a projection to attention."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from quire.ops.attention.rotation import Rotation, rotate
from quire.ops.norms import RMSNormOp, rms_norm
from quire.ops.weights.rounded_rows import Sums, scaled


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
    """The heads of a layer as they were projected, and what is done to them before they meet."""

    # [t, k, g + 2, h]: for each key its queries, itself and its value; [t, k, g + 1, h] where values are part of keys.
    qkv: Sums
    rotation: Rotation | None = None  # of queries and keys, after their norms
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    sinks: jax.Array | None = None  # [k, g], where the spec `has_sinks`: a score of each query head

    def finished(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [t, k, g, h], k [t, k, h] and v [t, k, h] as they meet."""
        q, k, v = self._normal(rms_norm)
        if self.rotation is not None:
            q, k = rotate(q, self.rotation), rotate(k, self.rotation)
        return q, k, v

    def with_norms_done(self, rms: RMSNormOp) -> "Heads":
        """Heads that have yet to be rotated; `rms` computes their norms."""
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
    """Heads to which nothing more is done."""
    return Heads(jnp.concatenate((q, k[:, :, None], v[:, :, None]), axis=2))
