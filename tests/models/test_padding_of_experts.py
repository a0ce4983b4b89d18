"""Padding reads no expert that the tokens beside it do not."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.models.context import PlatformOps
from quire.models.params import Param, Tensor
from quire.models.parts.feed_forward import Experts
from quire.models.parts.projection import router
from quire.models.parts.routing import SoftmaxRouter
from quire.ops.attention.reference import whole_sequence
from quire.ops.gates import SILU
from quire.ops.gpu.expert_product import expert_product
from quire.ops.weights.experts import NONE, ExpertKernels, kernels_of
from quire.ops.weights.floats import PlainWeight

EXPERTS, CHOSEN, EMBED, MLP, TOKENS = 64, 2, 32, 32, 8


def drawn() -> tuple[Experts, Any, jax.Array]:
    def param(*shape: int) -> Param:
        return Param(shape, (None,) * len(shape), (Tensor("drawn", shape),))

    experts = Experts(
        SILU,
        SoftmaxRouter(CHOSEN, True, router("router", EXPERTS, EMBED)),
        param(EXPERTS, 1, 2, MLP, EMBED),
        param(EXPERTS, EMBED, MLP),
    )
    chance = np.random.default_rng(0)

    def matrix(param: Param) -> PlainWeight:
        return PlainWeight(jnp.asarray(chance.standard_normal(param.shape), jnp.float32))

    weights = jax.tree.map(matrix, experts.params(), is_leaf=lambda one: isinstance(one, Param))
    return experts, weights, jnp.asarray(chance.standard_normal((TOKENS, EMBED)), jnp.float32)


class Watched:
    """Kernels that note the experts of tokens."""

    def __init__(self) -> None:
        self.experts: np.ndarray[Any, Any] | None = None
        product = kernels_of(partial(expert_product, interpret=True))
        self.kernels = ExpertKernels(partial(self._noted, product.product), partial(self._noted, product.total))

    def _noted(self, kernel: Any, x: jax.Array, expert: jax.Array, *others: Any) -> Any:
        self.experts = np.asarray(expert)
        return kernel(x, expert, *others)


@pytest.mark.parametrize("num_real", [1, 3, 8])
def test_padding_visits_the_experts_of_the_first_token(num_real: int) -> None:
    experts, weights, x = drawn()
    alone, watched = Watched(), Watched()
    experts(weights, x[:num_real], PlatformOps(whole_sequence, experts=alone.kernels))
    is_real = jnp.arange(TOKENS) < num_real
    experts(weights, x, PlatformOps(whole_sequence, experts=watched.kernels, is_real=is_real))
    assert alone.experts is not None
    assert watched.experts is not None
    assert np.array_equal(watched.experts[:num_real], alone.experts)
    assert set(watched.experts.flat) == set(alone.experts.flat)


@pytest.mark.parametrize("num_real", [1, 3])
def test_padding_changes_no_bit_of_a_token(num_real: int) -> None:
    experts, weights, x = drawn()
    all_real = experts(weights, x, PlatformOps(whole_sequence, experts=NONE))
    is_real = jnp.arange(TOKENS) < num_real
    found = experts(weights, x, PlatformOps(whole_sequence, experts=NONE, is_real=is_real))
    assert np.array_equal(found[:num_real], all_real[:num_real])
