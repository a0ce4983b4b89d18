"""What a model is to those who load, shard and run it."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from quire.models.params import ParamTree
from quire.ops.attention import Attend
from quire.ops.attention_spec import AttentionSpec
from quire.ops.norms import PLAIN, Norms

# What a layer keeps between steps. Attention is the only kind so far; another kind is another type here.
LayerSpec = AttentionSpec


class Model(Protocol):
    """An architecture with its sizes, and no weights; a pure function of those."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """How many positions a sequence can have."""

    @property
    def num_layers(self) -> int: ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def depends_on_length(self) -> bool:
        """Whether `forward` needs the lengths of the sequences."""

    def prefix_key(self, prompt_length: int) -> int:
        """Prompts can share cached prefixes only where this agrees."""

    def params(self) -> ParamTree: ...

    def canonical_name(self, name: str) -> str | None:
        """The name by which `params` knows a tensor of a checkpoint, or None for one the model has no use for."""

    def forward(
        self,
        weights: ParamTree,
        tokens: jax.Array,
        positions: jax.Array,
        states: Sequence[Any],
        attend: Attend,
        *,
        lengths: jax.Array | None = None,
        norms: Norms = PLAIN,
    ) -> tuple[jax.Array, list[Any]]:
        """The hidden vector of each token [t, d], and the states, one per layer, after it.

        `lengths` [t] is read by models that depend on it: the prompt length of a token's sequence, or the token's
        position + 1 where that is more. `norms` are those of the platform.
        """

    def logits(self, weights: ParamTree, hidden: jax.Array) -> jax.Array:
        """float32 [r, v] for hidden vectors [r, d]."""
