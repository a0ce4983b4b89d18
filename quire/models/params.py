"""One declaration per weight, from which its shape, sharding and loading follow."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.files.tensor_source import BLOCK_SIZE
from quire.ops.weights.floats import PlainWeight

Array = np.ndarray[Any, Any]
Join = Callable[[Sequence[Array]], Array]


@dataclass(frozen=True)
class Tensor:
    """A tensor as the checkpoint holds it, by its Hugging Face name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Param:
    """A weight as the model uses it.

    Matrices are stored [out, in]. `axes` names the logical axis of each dimension; `sharding.py` maps those to mesh
    axes. `sources` are the checkpoint tensors it is made of, `join` makes one array of `shape` from them.

    A product with activations contracts the last `num_contracted` axes of a matrix. Weights that have any can be
    quantised, in groups along their last axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[Tensor, ...]
    join: Join | None = None  # None: one source, reshaped to `shape`
    num_contracted: int = 0
    transposes: bool = False  # `join` moves numbers along the last axis of its sources, not only whole rows
    is_float32: bool = False  # whatever the dtype of the others
    is_widened: bool = False  # a matrix for each head: floats, also of a quantised checkpoint
    apart: "Param | None" = None  # the same weight from other tensors, for checkpoints that have those
    # One of its experts, [1, ...], where each has tensors of its own: the next ones among `sources`.
    of_expert: "Callable[[int], Param] | None" = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{self.sources}: {self.shape} against {self.axes}"
        assert self.join is not None or len(self.sources) == 1, f"{self.sources} need a join"

    def of(self, names: Container[str]) -> "Param":
        """The form whose tensors a checkpoint has; this one where it has neither."""
        if self.apart is None or any(tensor.name in names for tensor in self.sources):
            return self
        return self.apart if any(tensor.name in names for tensor in self.apart.sources) else self

    def assemble(self, tensors: Sequence[Array]) -> Array:
        """The weight, from its source tensors in the order of `sources`; or its blocks, from theirs."""
        joined = tensors[0] if self.join is None else self.join(tensors)
        return joined.reshape(*self.shape[:-1], -1)

    def dtype(self, of_others: str) -> str:
        """The dtype that it has where the model's weights have that of others."""
        return "float32" if self.is_float32 else of_others

    @property
    def contracted(self) -> int:
        """Axes of inputs of a matrix; one where none is declared."""
        return max(1, self.num_contracted)

    @property
    def num_matrices(self) -> int:
        return self.shape[0] if self.is_of_experts else 1

    def plain(self, array: Any) -> Any:
        """An array of its shape as the model takes it: a weight, if it is a matrix."""
        return PlainWeight(array, self.contracted) if self.is_matrix else array

    @property
    def is_matrix(self) -> bool:
        """True if activations are multiplied by it."""
        return self.num_contracted > 0 or self.is_widened or self.axes[0] == "experts"

    @property
    def is_of_experts(self) -> bool:
        """True of a matrix for each expert, [experts, ..., inputs]."""
        return self.axes[0] == "experts" and len(self.shape) > 2

    @property
    def keeps_blocks(self) -> bool:
        """True if each quantisation block of its sources is one of its own."""
        return not self.transposes and self.shape[-1] % BLOCK_SIZE == 0


# A model's weights are a tree of dicts and lists with a Param (later an array) at each leaf.
ParamTree = dict[str, Any]


def params_of(**parts: Any) -> ParamTree:
    """The params of those parts that a block has: each a Param, or something with `params()`."""
    return {
        name: part if isinstance(part, Param) else part.params() for name, part in parts.items() if part is not None
    }
