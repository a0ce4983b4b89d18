"""Blocks that leave a product and a norm to their readers give what they give without."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.models.context import NoStates, PlatformOps, TokenContext
from quire.models.parts.decoder import Decoder
from quire.models.random_weights import random_weights
from quire.models.registry import build_model
from quire.ops.attention.reference import whole_sequence
from quire.ops.weights.deferred import FewRows, FewRowsIn, NormalRows
from quire.ops.weights.floats import NativeWeight, PlainWeight
from quire.ops.weights.products import project
from quire.ops.weights.rounded_rows import Activation, ProductKernels, Rows, values

SIZES = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},  # biases, which no kernel adds
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 8},  # norms after blocks, and factors less one
    "granite": {"model_type": "granite", "residual_multiplier": 0.3},
    "cohere2": {"model_type": "cohere2"},  # both blocks read one norm
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}


@dataclass
class Plain:
    """The kernels in jnp, for weights of floats, and what they were asked for."""

    fits: bool = True
    asked: list[str] = field(default_factory=list)

    def sums(self, x: FewRowsIn, weight: Any, dtype: Any) -> jax.Array:
        self.asked.append(f"sums of {type(x).__name__}" if isinstance(x, NormalRows) else "sums")
        rows, factors = (x.unscaled, x.factors) if isinstance(x, NormalRows) else (x, 1.0)
        matrix = weight.values.reshape(-1, rows.shape[1])
        return (jnp.einsum("ti,oi->to", rows, matrix, preferred_element_type=jnp.float32) * factors).astype(dtype)

    def added(
        self, rows: FewRowsIn, weight: jax.Array, x: jax.Array, norm: jax.Array, eps: float, offset: float
    ) -> tuple[jax.Array, NormalRows]:
        self.asked.append("added")
        total = x + self.sums(rows, weight, jnp.float32)
        squares = jnp.square(total).reshape(len(x), 4, -1).sum(axis=2).T
        return total, NormalRows(total * (norm + offset), squares, eps)

    def gated(self, activation: Activation, x: Rows, gate_up: Any, down: Any) -> Rows:
        self.asked.append("gated")
        rows = x if isinstance(x, NormalRows) else values(x)
        both = self.sums(rows, gate_up, jnp.float32).reshape(len(x), 2, -1)
        return activation(both[:, 0]) * both[:, 1]

    def products(self) -> ProductKernels:
        def fits(num_rows: int, dtype: Any, weight: Any) -> bool:
            return self.fits and isinstance(weight, PlainWeight | NativeWeight)

        return ProductKernels(few_rows=FewRows(fits, self.sums, self.added), gated_product=self.gated)


def hidden(model: Decoder, weights: Any, products: ProductKernels) -> np.ndarray:
    tokens, positions = jnp.arange(7) * 11 % 128, jnp.arange(7)
    context = TokenContext(tokens, positions, lengths=positions + 1)
    run = partial(model.forward, states=NoStates(), ops=PlatformOps(whole_sequence, products=products))
    return np.asarray(run(weights, context)[0])


@pytest.mark.parametrize("name", CASES)
def test_models_give_the_same(name: str) -> None:
    model = build_model({**SIZES, **CASES[name]})
    assert isinstance(model, Decoder)
    weights, kernels = random_weights(model, seed=0, dtype="float32"), Plain()
    expected = hidden(model, weights, ProductKernels())
    np.testing.assert_allclose(hidden(model, weights, kernels.products()), expected, rtol=2e-4, atol=2e-5)
    if name == "llama":
        # A product for each block, and the last one, which the norm of all layers reads; layers are traced twice.
        assert kernels.asked.count("added") == 3
        assert kernels.asked.count("sums of NormalRows") >= 3
        assert "gated" in kernels.asked


def test_without_a_kernel_nothing_is_left_to_readers() -> None:
    model = build_model({**SIZES, **CASES["llama"]})
    kernels = Plain(fits=False)
    products = kernels.products()._replace(gated_product=None)
    hidden(model, random_weights(model, seed=0, dtype="float32"), products)  # type: ignore[arg-type]
    assert kernels.asked == []


def test_rows_without_their_factors_have_the_values_of_the_norm() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32)
    rows = NormalRows(x * 2.0, jnp.square(x).reshape(3, 2, 8).sum(axis=2).T, 1e-5)
    expected = x * 2.0 / jnp.sqrt(jnp.square(x).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(values(rows), expected, rtol=1e-6)
    assert (len(rows), rows.dtype) == (3, jnp.float32)
    assert project("ti,oi->to", rows, PlainWeight(x)).shape == (3, 3)
