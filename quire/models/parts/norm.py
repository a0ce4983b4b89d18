"""Normalisation of the last axis, computed in float32."""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from quire.models.params import Array, Param, ParamTree, Tensor
from quire.ops.attention.heads import HeadNorm
from quire.ops.norms import Norms
from quire.ops.row_norms import RMS, MeanAndDeviation, RowNorm


class Norm(Protocol):
    def params(self) -> ParamTree: ...

    def __call__(self, weights: ParamTree, x: jax.Array, norms: Norms) -> jax.Array: ...

    def bind(self, weights: ParamTree) -> RowNorm: ...


@dataclass(frozen=True)
class RMSNorm:
    """Divides by the root mean square. The factors are `offset + weight`: Gemma stores them less one."""

    name: str
    size: int
    eps: float
    offset: float = 0.0

    def params(self) -> ParamTree:
        return {"weight": Param((self.size,), (None,), (Tensor(f"{self.name}.weight", (self.size,)),))}

    def __call__(self, weights: ParamTree, x: jax.Array, norms: Norms) -> jax.Array:
        return self.bind(weights)(x, norms)

    def bind(self, weights: ParamTree) -> RowNorm:
        return RMS(weights["weight"], self.eps, self.offset)

    def of_heads(self, weights: ParamTree) -> HeadNorm:
        return HeadNorm(weights["weight"], self.eps, self.offset)

    def with_key_copies(self, copies: int) -> "RMSNorm":
        return self


@dataclass(frozen=True)
class GroupedRMSNorm:
    """Divides each of `groups` equal parts by its own root mean square. The factors are those of all parts in a row."""

    name: str
    groups: int
    size: int
    eps: float

    def params(self) -> ParamTree:
        return RMSNorm(self.name, self.groups * self.size, self.eps).params()

    def __call__(self, weights: ParamTree, x: jax.Array, norms: Norms) -> jax.Array:
        if self.groups == 1:
            return norms.rms(x, weights["weight"], self.eps, 0.0)
        normal = norms.rms(x.reshape(-1, self.size), jnp.ones(self.size, x.dtype), self.eps, 0.0)
        factors: jax.Array = weights["weight"]
        return normal.reshape(x.shape) * factors.astype(x.dtype)


@dataclass(frozen=True)
class HeadsRMSNorm:
    """An RMS norm over all heads together, those of keys, or those of queries with the `group` of each key."""

    name: str
    kv_heads: int
    head_dim: int
    eps: float
    group: int | None = None
    copies: int = 1  # of each head in x; the mean is the same

    def params(self) -> ParamTree:
        group = () if self.group is None else (self.group,)
        stored = (self.kv_heads, *group, self.head_dim)
        shape = (self.kv_heads * self.copies, *group, self.head_dim)
        axes = ("kv_heads", *(None for _ in shape[1:]))
        source = Tensor(f"{self.name}.weight", (math.prod(stored),))
        return {"weight": Param(shape, axes, (source,), lambda tensors: self._repeated(tensors[0].reshape(stored)))}

    def of_heads(self, weights: ParamTree) -> HeadNorm:
        return HeadNorm(weights["weight"], self.eps)

    def with_key_copies(self, copies: int) -> "HeadsRMSNorm":
        """The same where there are so many copies of each key, each for a part of its queries."""
        if self.group is None:
            return replace(self, copies=copies)
        return replace(self, kv_heads=self.kv_heads * copies, group=self.group // copies)

    def _repeated(self, weight: Array) -> Array:
        return np.repeat(weight, self.copies, axis=0)


@dataclass(frozen=True)
class PlainHeadNorm:
    """Divides each head by its root mean square, without factors."""

    size: int
    eps: float

    def params(self) -> ParamTree:
        return {}

    def of_heads(self, weights: ParamTree) -> HeadNorm:
        return HeadNorm(jnp.ones(self.size, jnp.float32), self.eps)

    def with_key_copies(self, copies: int) -> "PlainHeadNorm":
        return self


# Norms of the heads of queries or keys.
HeadNorms = RMSNorm | HeadsRMSNorm | PlainHeadNorm


@dataclass(frozen=True)
class LayerNorm:
    """Subtracts the mean, divides by the standard deviation, scales and shifts where it is `biased`."""

    name: str
    size: int
    eps: float
    biased: bool = True

    def params(self) -> ParamTree:
        return {
            part: Param((self.size,), (None,), (Tensor(f"{self.name}.{part}", (self.size,)),))
            for part in ("weight", "bias")[: 1 + self.biased]
        }

    def __call__(self, weights: ParamTree, x: jax.Array, norms: Norms) -> jax.Array:
        return self.bind(weights)(x, norms)

    def bind(self, weights: ParamTree) -> RowNorm:
        return MeanAndDeviation(weights["weight"], weights["bias"] if self.biased else None, self.eps)
