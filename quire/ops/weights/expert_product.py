"""The products of tokens with the matrices of the experts that each of them visits."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from quire.ops.expert_choice import ExpertChoice, choose
from quire.ops.weights.coded import FEW_ROWS, Coded

Gate = Callable[[jax.Array, jax.Array], jax.Array]  # of gates and ups in float32


class ExpertProduct(Protocol):
    def __call__(
        self, x: jax.Array, expert: jax.Array, weight: Any, bias: jax.Array | None = None, gate: Gate | None = None
    ) -> jax.Array | None:
        """[t, chosen, outputs] of x [t, chosen or 1, inputs], each row with the matrix of its expert [t, chosen].

        No token visits an expert twice. The weight has [e, ..., inputs] of any type, the bias [e, ...] if there is one.
        The sums are float32. With a gate the outputs are two halves: the result is gate(first, second), each half
        rounded to the type of x before, and the result after it. None where a platform has no kernel for the weight.
        """


class ExpertSum(Protocol):
    def __call__(
        self, x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Any, bias: jax.Array | None = None
    ) -> jax.Array | None:
        """float32 [t, outputs]: an `ExpertProduct` times the shares [t, chosen], or 1, summed over the choices."""


class ExpertKernels(NamedTuple):
    """The kernels of a platform for the two products of experts, into them and out of them, and for their choice."""

    product: ExpertProduct
    total: ExpertSum
    choose: ExpertChoice = choose


def kernels_of(product: ExpertProduct, choose: ExpertChoice = choose) -> ExpertKernels:
    def total(
        x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Any, bias: jax.Array | None = None
    ) -> jax.Array | None:
        out = product(x, expert, weight, bias)
        if out is None:
            return None
        return jnp.sum(out if share is None else out * share[:, :, None], axis=1)

    return ExpertKernels(product, total, choose)


def _declined(
    x: jax.Array, expert: jax.Array, weight: Any, bias: jax.Array | None = None, gate: Gate | None = None
) -> None:
    """Of platforms whose grouped products are as fast as any."""


NONE = kernels_of(_declined)


def rounded_rows(x: jax.Array, expert: jax.Array, weight: Any) -> jax.Array:
    """The rows x [t, chosen or 1, inputs] as a weight asks for them. Those of few tokens stay what they are where that
    is allowed: the products of dense layers do the same."""
    if not isinstance(weight, Coded) or weight.rounding is None:
        return x
    if weight.is_direct and weight.bits == 8 and weight.input_scale is None and len(x) <= FEW_ROWS:
        return weight.rounding.unrounded(x)
    if weight.input_scale is not None:  # of each expert its own
        x = jnp.broadcast_to(x, (*expert.shape, x.shape[-1]))
    return weight.rounded_rows(x.reshape(-1, x.shape[-1]), expert.reshape(-1)).reshape(x.shape)
