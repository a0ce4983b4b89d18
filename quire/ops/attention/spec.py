"""The numbers of one attention layer."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from quire.layer_kind import ATTENTION, LATENT_ATTENTION, LayerKind
from quire.ops.layer_spec import LayerSpec
from quire.reach import ChunkReach, Reach


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """The constants of an attention layer.

    Its state is `kv_heads` keys and as many values of size `head_dim` for each position; each key serves `group` query
    heads. A token sees itself and what came before it; in a layer with a `window`, only the last `window` positions,
    itself among them; in one with a `chunk`, only those of its own chunk, of which each has so many positions. A score
    is `scale * q.k`, and with a `softcap` c it becomes `c * tanh(score / c)`.

    Where it `has_sinks`, each query head has one more score, the same at every position, that takes its part of the
    softmax and has no value.

    With a `value_dim`, values are the first so many features of keys, and the state has keys alone: latent attention.

    `read_in` is the type of the codes in which a product reads what the layer gives, where it reads codes.
    """

    kv_heads: int
    group: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    chunk: int | None = None
    read_in: Any = None

    @property
    def kind(self) -> LayerKind:
        return ATTENTION if self.value_dim is None else LATENT_ATTENTION

    def reach(self, longest: int) -> Reach:
        if self.chunk is not None:
            return None if self.chunk >= longest else ChunkReach(max(self.chunk, 2))
        return None if self.window is None or self.window >= longest else max(self.window, 2)

    @property
    def allows_fresh_kernel(self) -> bool:
        return self.sees_all and self.softcap is None and not self.has_sinks and self.value_dim is None

    @property
    def shares_prefixes(self) -> bool:
        return self.sees_all and self.value_dim is None

    @property
    def sees_all(self) -> bool:
        """True if a token sees everything that came before it."""
        return self.window is None and self.chunk is None

    def first_seen(self, positions: jax.Array) -> jax.Array:
        """The first position that each of these sees."""
        if self.chunk is not None:
            return positions - positions % self.chunk
        return jnp.zeros_like(positions) if self.window is None else jnp.maximum(positions - self.window + 1, 0)
