"""The interface by which models are loaded, sharded and run."""

from typing import Protocol, TypeVar

import jax

from quire.models.context import LayerStates, PlatformOps, TokenContext
from quire.models.params import ParamTree
from quire.ops.layer_spec import LayerSpec

States = TypeVar("States", bound=LayerStates)


class Model(Protocol):
    """An architecture with its sizes and without weights. All methods are pure functions."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens."""

    @property
    def num_layers(self) -> int: ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def depends_on_length(self) -> bool:
        """True if `forward` needs `TokenContext.lengths`."""

    def prefix_key(self, prompt_length: int) -> int:
        """Prompts can share cached prefixes only where this agrees."""

    @property
    def switch_length(self) -> int | None:
        """A sequence that grows beyond this length must be computed anew, from its first token on; None: none must."""

    def params(self) -> ParamTree: ...

    def canonical_name(self, name: str) -> str | None:
        """The name of a checkpoint's tensor in `params`; None for a tensor that the model does not use."""

    def forward(
        self, weights: ParamTree, context: TokenContext, states: States, ops: PlatformOps
    ) -> tuple[jax.Array, States]:
        """The hidden vector of each token [t, d], and the states of the layers after them."""

    def logits(self, weights: ParamTree, hidden: jax.Array) -> jax.Array:
        """float32 [r, v] for hidden vectors [r, d]."""
