"""A weight: a matrix, or one for each expert, whatever its form.

All that a model does with a weight is here. A form implements `product`, `map` and what it is used for; each other
method has a default for forms that have nothing special to give. A new form is one file of this folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

from quire.ops.weights.deferred import FewRows, FewRowsIn
from quire.ops.weights.rounded_rows import Activation, CodeProduct, Rows, ScaledSums, Sums, values

Axes = tuple[str | None, ...]


class Weight(ABC):
    """A matrix [*outputs, *inputs], of which the last `num_contracted` axes are inputs; or [experts, *outputs, inputs],
    with a matrix for each expert. Registered as a pytree, so that programs take and return it."""

    if TYPE_CHECKING:  # a dataclass would take a property of its base for the default of its field

        @property
        def shape(self) -> tuple[int, ...]:
            """The shape of its numbers."""

        @property
        def num_contracted(self) -> int: ...

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.num_contracted]

    @property
    def inputs(self) -> int:
        return prod(self.shape[-self.num_contracted :])

    # Products. Results are float32, or rounded to `dtype` where the caller does that anyway and a product can.

    @abstractmethod
    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        """[t, outputs] of rows x [t, *inputs]."""

    def rows(self, indices: jax.Array) -> jax.Array:
        """[n, inputs]: some rows of a matrix."""
        raise NotImplementedError(f"{type(self).__name__} is not for embeddings")

    def grouped_product(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """float32 [n, outputs] of x [n, inputs], with each expert's matrix for the next of the `sizes` rows."""
        raise NotImplementedError(f"{type(self).__name__} is not for experts")

    def product_by_head(self, x: jax.Array) -> jax.Array:
        """[t, k, g, o] of x [t, k, g, i], where the weight has a matrix for each head, [k, g, o, i]."""
        raise NotImplementedError(f"{type(self).__name__} is not for matrices of heads")

    # Placement: devices, and the forms for platforms.

    @abstractmethod
    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> Self:
        """The same with change(array, its axes) for each array it consists of; `axes` are those of its shape."""

    def native(self) -> "Weight":
        """The form that the native library multiplies, on one CPU."""
        return self

    def direct(self, forms: "Sequence[Callable[[Any], Weight | None]]" = ()) -> "Weight":
        """The form for GPUs, which multiply codes as they are: the first of these that there is of these codes."""
        return self

    def for_rows(self, num_rows: jax.Array) -> Self:
        """The same for products that need the first rows only, where kernels can skip the others."""
        return self

    def for_shape(self, shape: tuple[int, ...]) -> Self:
        """The same of arrays that have become those of another number of experts."""
        return self

    # Fused products. A method that returns None leaves the work to its caller.

    def row_code_dtype(self, num_rows: int, kernel: CodeProduct | None) -> Any | None:
        """The type of the codes that so many rows are multiplied in, each row with a scale of its own."""
        return None

    def code_sums(self, x: Rows, dtype: Any, kernel: CodeProduct | None) -> ScaledSums | None:
        """The product of rows that have codes of `row_code_dtype`, for a reader that applies scales."""
        return None

    def few_row_product(self, rows: FewRowsIn, kernels: FewRows, dtype: Any) -> jax.Array | None:
        """The product by the kernels for few rows: of `dtype`, or of float32 where the caller has to add to it."""
        return kernels.sums(rows, self, dtype) if kernels.fits(len(rows), rows.dtype, self) else None

    def gated_rows(self, activation: Activation, x: Rows) -> jax.Array | None:
        """activation(gate) * up of the product, whose outputs are [1, 2, m]: [t, m]."""
        return None

    def product_of_gated(self, activation: Activation, both: Sums) -> jax.Array | None:
        """float32 [t, outputs]: the product of activation(gate) * up, both [t, p, 2, m / p]."""
        return None

    def grouped_product_of_gated(self, gate: Any, both: jax.Array, sizes: jax.Array) -> jax.Array | None:
        """`grouped_product` of gate(gates, ups), both [n, p, 2, m / p]."""
        return None

    # Experts.

    def rounded_visits(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """The rows x [t, chosen or 1, inputs] as the experts [t, chosen] take them, rounded if the weight asks so."""
        return x

    def without_rounding(self) -> "Weight":
        """The same for rows that are rounded already."""
        return self

    def part_of_device(self) -> "Weight":
        """The same with the shape that its arrays have, which are one device's parts of the whole."""
        return self

    # Adapters.

    def with_room(self, num_rows: int, dtype: Any) -> "Weight | None":
        """The weight with so many rows below it for what adapters have. This one is deleted."""
        return None

    def join(self, stack: Any) -> "tuple[Weight | None, Any]":
        """The weight and the stack of its adapters: the stack alone, with the weight in it, where it has room."""
        return self, stack

    # Facts for planning programs.

    @property
    def widened_bytes(self) -> int:
        """Bytes of the float copy that a product makes, at most."""
        return 0

    @property
    def has_codes(self) -> bool:
        """True for codes of a checkpoint, and for eight-bit ones on GPUs."""
        return False

    @property
    def gains_from_timings(self) -> bool:
        """True where a GPU's compiler should choose the products with many decodes by timing them."""
        return False


def is_weight(node: object) -> bool:
    return isinstance(node, Weight)


def weights_of(tree: Any) -> list[Weight]:
    """The weights of a tree of parameters, in its order; others, such as norms, are left out."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_weight) if isinstance(node, Weight)]


def map_weights(change: Callable[[Weight], Any], tree: Any) -> Any:
    """The tree with change(weight) for each weight."""
    return jax.tree.map(lambda node: change(node) if isinstance(node, Weight) else node, tree, is_leaf=is_weight)


def map_arrays(change: Callable[[Any, Axes], Any], weight: Any, axes: Axes) -> Any:
    """A weight, or an array that is none, with change(array, its axes) for each array."""
    return weight.map(change, axes) if isinstance(weight, Weight) else change(weight, axes)


def for_rows(weights: Any, num_rows: jax.Array) -> Any:
    """Weights whose products compute the first rows only, where kernels can: padding then costs next to nothing."""
    return map_weights(lambda weight: weight.for_rows(num_rows), weights)


def flat_rows(x: Rows) -> jax.Array:
    """The numbers of rows x [t, *inputs]: [t, inputs]."""
    rows = values(x)
    return rows.reshape(len(rows), -1)


def code_dtype(weights: Any, num_rows: int, kernel: CodeProduct | None) -> Any | None:
    """The type of codes in which so many rows meet a weight, or those of a block, which are alike where a checkpoint
    does not leave some as they are; None where they are not rounded."""
    found = (weight.row_code_dtype(num_rows, kernel) for weight in weights_of(weights))
    return next((dtype for dtype in found if dtype is not None), None)


def ragged_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """float32 [n, o] of x [n, i] with, for each run of `sizes` rows, the next of the matrices [e, o, i]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(
        x, matrices, sizes.astype(jnp.int32), dimensions, preferred_element_type=jnp.float32
    )
