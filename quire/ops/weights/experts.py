"""Experts: the products of tokens with the matrices that each of them visits, and the gated sum of these."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from quire.ops.expert_choice import ExpertChoice, choose
from quire.ops.weights.deferred import VisitSums
from quire.ops.weights.weight import Weight

Gate = Callable[[jax.Array, jax.Array], jax.Array]  # of gates and ups in float32


class ExpertProduct(Protocol):
    def __call__(
        self, x: jax.Array, expert: jax.Array, weight: Weight, bias: jax.Array | None = None, gate: Gate | None = None
    ) -> jax.Array | None:
        """[t, chosen, outputs] of x [t, chosen or 1, inputs], each row with the matrix of its expert [t, chosen].

        No token visits an expert twice. The weight has [e, ..., inputs] in any form, the bias [e, ...] if there is one.
        The sums are float32. With a gate the outputs are two halves: the result is gate(first, second), each half
        rounded to the type of x before, and the result after it. None where a platform has no kernel for the weight.
        """


class ExpertSum(Protocol):
    def __call__(
        self, x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Weight, bias: jax.Array | None = None
    ) -> jax.Array | None:
        """float32 [t, outputs]: an `ExpertProduct` times the shares [t, chosen], or 1, summed over the choices."""


class ExpertKernels(NamedTuple):
    """The kernels of a platform for the two products of experts, into them and out of them, and for their choice."""

    product: ExpertProduct
    total: ExpertSum
    choose: ExpertChoice = choose


def kernels_of(product: ExpertProduct, choose: ExpertChoice = choose) -> ExpertKernels:
    def total(
        x: jax.Array, expert: jax.Array, share: jax.Array | None, weight: Weight, bias: jax.Array | None = None
    ) -> jax.Array | None:
        out = product(x, expert, weight, bias)
        if out is None:
            return None
        return jnp.sum(out if share is None else out * share[:, :, None], axis=1)

    return ExpertKernels(product, total, choose)


def _declined(
    x: jax.Array, expert: jax.Array, weight: Weight, bias: jax.Array | None = None, gate: Gate | None = None
) -> None:
    """Of platforms whose grouped products are as fast as any."""


NONE = kernels_of(_declined)


class GatedExperts(NamedTuple):
    """The gated MLPs of a layer. Where it `scales_inputs`, the shares of experts are factors of what they are given,
    not of their outputs."""

    gate: Gate
    gate_up: Weight  # [e, p, 2, m / p, d]
    down: Weight  # [e, d, m]
    gate_up_bias: jax.Array | None = None  # [e, p, 2, m / p]
    down_bias: jax.Array | None = None  # [e, d]
    scales_inputs: bool = False

    def total(
        self,
        x: jax.Array,
        share: jax.Array,
        expert: jax.Array,
        kernels: ExpertKernels,
        *,
        leaves_sums: bool = False,
        is_real: jax.Array | None = None,
    ) -> jax.Array | VisitSums:
        """The sum over the experts [t, chosen] that tokens x [t, d] visit, weighted by their shares. Where it
        `leaves_sums`, its reader adds up what the experts of a token give, if they come apart."""
        found = self._by_kernels(x, share, expert, kernels, leaves_sums=leaves_sums)
        return self._sorted_by_expert(x, share, expert, is_real) if found is None else found

    def _by_kernels(
        self, x: jax.Array, share: jax.Array, expert: jax.Array, kernels: ExpertKernels, *, leaves_sums: bool
    ) -> jax.Array | VisitSums | None:
        """By the platform's kernels, if it has some for these weights. Tokens stay in their order."""
        inputs = x[:, None]
        if self.scales_inputs:
            inputs = (inputs.astype(jnp.float32) * share[:, :, None]).astype(x.dtype)
        active = kernels.product(inputs, expert, self.gate_up, self.gate_up_bias, self.gate)
        if active is None:
            return None
        if leaves_sums and not self.scales_inputs:
            visits = kernels.product(active, expert, self.down, self.down_bias)
            if visits is not None:
                return VisitSums(visits, share, x.dtype)
        out = kernels.total(active, expert, None if self.scales_inputs else share, self.down, self.down_bias)
        return None if out is None else out.astype(x.dtype)

    def _sorted_by_expert(
        self, x: jax.Array, share: jax.Array, expert: jax.Array, is_real: jax.Array | None
    ) -> jax.Array:
        """Tokens are sorted by expert: the experts are one grouped product, and each token visits its own only."""
        tokens, chosen = expert.shape
        num_experts, *parts, embed = self.gate_up.shape
        if is_real is not None:  # padding visits none: its rows are behind all others
            expert = jnp.where(is_real[:, None], expert, num_experts)
        order = jnp.argsort(expert.reshape(-1), stable=True)  # of the visits, [t * chosen]
        visits = jnp.bincount(expert.reshape(-1), length=num_experts)  # of each expert
        visited = expert.reshape(-1)[order]

        def biased(found: jax.Array, bias: jax.Array | None) -> jax.Array:
            return found if bias is None else found + bias[visited].astype(jnp.float32).reshape(found.shape)

        inputs, share = x[order // chosen], share.reshape(-1)[order][:, None]
        if self.scales_inputs:
            inputs = (inputs.astype(jnp.float32) * share).astype(x.dtype)
        both = biased(self.gate_up.grouped_product(inputs, visits), self.gate_up_bias)
        both = both.astype(x.dtype).reshape(-1, *parts)
        outputs = self.down.grouped_product_of_gated(self.gate, both, visits)
        if outputs is None:
            wide = both.astype(jnp.float32)
            active = self.gate(wide[:, :, 0], wide[:, :, 1]).astype(both.dtype).reshape(len(both), -1)
            outputs = self.down.grouped_product(active, visits)
        outputs = biased(outputs, self.down_bias)
        outputs = outputs if self.scales_inputs else outputs * share
        return jnp.zeros((tokens, embed), jnp.float32).at[order // chosen].add(outputs).astype(x.dtype)
