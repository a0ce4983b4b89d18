"""The values that `Model.forward` takes: facts about the tokens, states of the layers, operations of the platform."""

from typing import Any, NamedTuple, Protocol, Self

import jax

from quire.ops.attention.reference import Attend
from quire.ops.norms import PLAIN, Norms
from quire.ops.recurrence import PLAIN as PLAIN_RECURRENT
from quire.ops.recurrence import RecurrentOps
from quire.ops.weights.adapters import AdapterProduct, add_products
from quire.ops.weights.experts import NONE as NO_EXPERT_KERNELS
from quire.ops.weights.experts import ExpertKernels
from quire.ops.weights.rounded_rows import PLAIN as PLAIN_PRODUCTS
from quire.ops.weights.rounded_rows import ProductKernels


class TokenContext(NamedTuple):
    """Everything that a model may know about the tokens of a step, one entry per token.

    A new fact about tokens is a new field. Embeddings given in place of tokens (images, prompt tuning) would be one,
    read only by `Decoder.embed`.
    """

    tokens: jax.Array  # [t]
    positions: jax.Array  # [t]
    # [t], where `Model.depends_on_length`: the prompt length of the token's sequence, or position + 1 if that is more;
    # beyond `Model.switch_length` where the sequence is.
    lengths: jax.Array | None = None
    adapters: "Adapters | None" = None


class Adapters(NamedTuple):
    """The adapters on the device, and the one that each token has."""

    rows: jax.Array  # int32 [t]: 0 for none, otherwise a slot of the stacks + 1
    layers: list[Any]  # by layer: an `AdapterStack` for each weight that can be adapted


class LayerStates(Protocol):
    """The states of all layers during one forward pass; `put` returns the states after a layer's.

    Several layers may keep their states in one array, so a layer is given its state only when its turn comes. A state
    is a pytree: the arrays that the layer writes, with what tells it where in them to read and write.
    """

    def get(self, layer: int) -> Any: ...

    def put(self, layer: int, state: Any) -> Self: ...


class NoStates:
    """For layers that keep nothing, as attention by `whole_sequence`."""

    def get(self, layer: int) -> None:
        return None

    def put(self, layer: int, state: None) -> Self:
        return self


class PlatformOps(NamedTuple):
    """The operations inside a layer that each platform implements its own way."""

    attend: Attend
    norms: Norms = PLAIN
    adapter_product: AdapterProduct = add_products
    recurrent: RecurrentOps = RecurrentOps(PLAIN_RECURRENT)
    experts: ExpertKernels = NO_EXPERT_KERNELS
    products: ProductKernels = PLAIN_PRODUCTS
    is_real: jax.Array | None = None  # bool [t]: the others are padding, which nothing reads; None: all are
