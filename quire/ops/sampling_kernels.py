"""The kernels that a platform has for sampling, where XLA alone takes too long."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax

BLOCK = 256  # of the vocabulary: a token is drawn from a block that is drawn before

# Of logits, top_k, top_p, min_p and typical_p: the logits again, and the cut, centre and spread of what they leave.
FilterCuts = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array, jax.Array]
]


class Highest(Protocol):
    def __call__(self, values: jax.Array, num_rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The places [r] of the highest of values [r, v], the first of equals, and the numbers there; a NaN counts as
        the highest. Of the first `num_rows` []; what the others get is not read."""


class Drawn(NamedTuple):
    tokens: jax.Array  # int32 [r]
    likeliest: jax.Array  # int32 [r]: the first of equals
    highest: jax.Array  # float32 [r]: their logits, or NaN where there is one


class DrawTokens(Protocol):
    def __call__(self, logits: jax.Array, temperature: jax.Array, uniform: jax.Array, /) -> Drawn:
        """A token for each row of logits [r, v] by its probability at a temperature [r], as two numbers [r, 2] choose.
        The tokens of rows whose highest logit is not finite are not read."""


class SamplingKernels(NamedTuple):
    """`highest` comes with `filter_cuts`, and not with `draw_tokens`."""

    filter_cuts: FilterCuts | None = None
    highest: Highest | None = None
    draw_tokens: DrawTokens | None = None


NONE = SamplingKernels()
