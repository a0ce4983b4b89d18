"""The experts of tokens by their scores."""

from enum import Enum, auto
from typing import Protocol

import jax
import jax.numpy as jnp


class Shares(Enum):
    """The kinds of shares that chosen experts can have."""

    SCORES = auto()  # the scores themselves
    SIGMOIDS = auto()  # each by itself
    OF_ALL = auto()  # a softmax over all experts
    OF_CHOSEN = auto()  # and over those that are chosen: they add up to one


class ExpertChoice(Protocol):
    def __call__(
        self, scores: jax.Array, chosen: int, shares: Shares, is_real: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """For float32 scores [t, e] the shares and the numbers of the highest, [t, chosen] each, from the highest on.

        Of equal ones the first come first. Tokens that are not real, by bool [t], choose what the first token does.
        """


def choose(
    scores: jax.Array, chosen: int, shares: Shares, is_real: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """An `ExpertChoice` for any platform."""
    best, expert = jax.lax.top_k(scores, chosen)
    if is_real is not None:
        expert = jnp.where(is_real[:, None], expert, expert[:1])
    if shares is Shares.SIGMOIDS:
        best = jax.nn.sigmoid(best)
    elif shares is Shares.OF_CHOSEN:
        best = jax.nn.softmax(best, axis=-1)
    elif shares is Shares.OF_ALL:
        best = jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return best, expert
