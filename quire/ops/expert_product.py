"""The products of tokens with the matrices of the experts that each of them visits."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

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


def declined(
    x: jax.Array, expert: jax.Array, weight: Any, bias: jax.Array | None = None, gate: Gate | None = None
) -> None:
    """Of platforms whose grouped products are as fast as any."""
