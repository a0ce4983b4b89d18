"""The choice of experts for each token."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from quire.models.params import Param, ParamTree
from quire.ops.expert_choice import ExpertChoice, Shares
from quire.ops.weights.products import matmul

SMALLEST_SUM = 1e-20  # of shares, which are divided by it


class Router(Protocol):
    @property
    def chosen(self) -> int:
        """Experts of a token."""

    def params(self) -> ParamTree: ...

    def __call__(
        self, weights: ParamTree, x: jax.Array, choose: ExpertChoice, is_real: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """For each token of x [t, d] its experts and their shares of its output, [t, chosen] each: shares first.

        Tokens that are not real choose what the first token does.
        """


@dataclass(frozen=True)
class SoftmaxRouter:
    """The most likely experts. Their shares are the probabilities; where it is `normalised` they add up to one."""

    chosen: int
    normalised: bool
    weight: Param  # [e, d]

    def params(self) -> ParamTree:
        return {"weight": self.weight}

    def __call__(
        self, weights: ParamTree, x: jax.Array, choose: ExpertChoice, is_real: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        shares = Shares.OF_CHOSEN if self.normalised else Shares.OF_ALL
        return choose(matmul(x, weights["weight"]), self.chosen, shares, is_real)


@dataclass(frozen=True)
class SigmoidRouter:
    """The experts with the highest scores. Their shares are the sigmoids of these, each by itself."""

    chosen: int
    weight: Param  # [e, d]

    def params(self) -> ParamTree:
        return {"weight": self.weight}

    def __call__(
        self, weights: ParamTree, x: jax.Array, choose: ExpertChoice, is_real: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        return choose(matmul(x, weights["weight"]), self.chosen, Shares.SIGMOIDS, is_real)


@dataclass(frozen=True)
class BiasedRouter:
    """The experts with the highest scores, to which a bias belongs. Their shares are a softmax over only these."""

    chosen: int
    weight: Param  # [e, d]
    bias: Param  # [e]

    def params(self) -> ParamTree:
        return {"weight": self.weight, "bias": self.bias}

    def __call__(
        self, weights: ParamTree, x: jax.Array, choose: ExpertChoice, is_real: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        scores = matmul(x, weights["weight"]) + weights["bias"].astype(jnp.float32)
        return choose(scores, self.chosen, Shares.OF_CHOSEN, is_real)


@dataclass(frozen=True)
class GroupedSoftmaxRouter:
    """The most likely experts among those of the best groups. A group is as good as its best expert.

    Shares are the probabilities times `multiplier`.
    """

    chosen: int
    weight: Param  # [e, d]
    num_groups: int
    chosen_groups: int
    multiplier: float

    def params(self) -> ParamTree:
        return {"weight": self.weight}

    def __call__(
        self, weights: ParamTree, x: jax.Array, choose: ExpertChoice, is_real: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        likely = jax.nn.softmax(matmul(x, weights["weight"]), axis=-1)
        if self.chosen_groups < self.num_groups:
            grouped = likely.reshape(len(x), self.num_groups, -1)
            likely = _among_best(grouped, jnp.max(grouped, axis=-1), self.chosen_groups, 0.0)
        share, expert = choose(likely, self.chosen, Shares.SCORES, is_real)
        return share * self.multiplier, expert


@dataclass(frozen=True)
class GroupedRouter:
    """The experts with the highest scores, each a sigmoid plus a bias, among those of the best groups.

    A group is as good as the sum of its two best. Shares are the sigmoids without the bias, times `multiplier`; where
    it is `normalised` they add up to that.
    """

    chosen: int
    normalised: bool
    weight: Param  # [e, d]
    bias: Param  # [e]
    num_groups: int
    chosen_groups: int
    multiplier: float

    def params(self) -> ParamTree:
        return {"weight": self.weight, "bias": self.bias}

    def __call__(
        self, weights: ParamTree, x: jax.Array, choose: ExpertChoice, is_real: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        likely = jax.nn.sigmoid(matmul(x, weights["weight"]))  # [t, e]
        scores = likely + weights["bias"].astype(jnp.float32)
        if self.chosen_groups < self.num_groups:
            grouped = scores.reshape(len(x), self.num_groups, -1)
            best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
            scores = _among_best(grouped, best, self.chosen_groups, -jnp.inf)
        _, expert = choose(scores, self.chosen, Shares.SCORES, is_real)
        share = jnp.take_along_axis(likely, expert, axis=-1)
        if self.normalised:
            share = share / (jnp.sum(share, axis=-1, keepdims=True) + SMALLEST_SUM)
        return share * self.multiplier, expert


def _among_best(grouped: jax.Array, best: jax.Array, chosen_groups: int, other: float) -> jax.Array:
    """Scores [t, e] of those grouped [t, n, e / n] whose groups are the best by `best` [t, n]; `other` for the rest."""
    tokens = jnp.arange(len(grouped))[:, None]
    allowed = jnp.zeros(best.shape, bool).at[tokens, jax.lax.top_k(best, chosen_groups)[1]].set(True)
    return jnp.where(allowed[:, :, None], grouped, other).reshape(len(grouped), -1)
