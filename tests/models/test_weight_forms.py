"""A form of weights is one class: what a model does with it follows from the contract."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.models.checkpoint import load_weights
from quire.models.params import ParamTree
from quire.models.registry import build_model
from quire.ops.native import library
from quire.ops.weights.floats import NativeWeight, PlainWeight
from quire.ops.weights.int8 import group, pack
from quire.ops.weights.parts import Parts
from quire.ops.weights.rounded_rows import Rows
from quire.ops.weights.weight import Axes, Weight, flat_rows, for_rows, map_weights, ragged_product, weights_of
from tests.models.cases import CASES
from tests.models.tiny import NamedTensors, prompt, relative_error, whole_logits, without_native


@partial(jax.tree_util.register_dataclass, data_fields=["coarse", "fine"], meta_fields=["num_contracted"])
@dataclass(frozen=True)
class TwoHalves(Weight):
    """Floats as the sum of two of half their bits: a form that no other file knows."""

    coarse: Any  # bfloat16
    fine: Any  # bfloat16: what is left
    num_contracted: int

    @classmethod
    def of(cls, weight: Weight) -> "TwoHalves":
        assert isinstance(weight, PlainWeight)
        coarse = weight.values.astype(jnp.bfloat16)
        return cls(coarse, (weight.values - coarse).astype(jnp.bfloat16), weight.num_contracted)

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.coarse.shape
        return shape

    def map(self, change: Callable[[Any, Axes], Any], axes: Axes) -> "TwoHalves":
        return replace(self, coarse=change(self.coarse, axes), fine=change(self.fine, axes))

    def product(self, x: Rows, dtype: Any = jnp.float32) -> jax.Array:
        return flat_rows(x) @ self._floats(self.coarse, self.fine).reshape(-1, self.inputs).T

    def rows(self, indices: jax.Array) -> jax.Array:
        return self._floats(self.coarse[indices], self.fine[indices])

    def grouped_product(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_product(x, self._floats(self.coarse, self.fine).reshape(self.shape[0], -1, self.inputs), sizes)

    def product_by_head(self, x: jax.Array) -> jax.Array:
        return PlainWeight(self._floats(self.coarse, self.fine)).product_by_head(x)

    def _floats(self, coarse: jax.Array, fine: jax.Array) -> jax.Array:
        return coarse.astype(jnp.float32) + fine.astype(jnp.float32)


def plain_weights(name: str) -> ParamTree:
    weights: ParamTree = without_native(
        load_weights(build_model(CASES[name]), NamedTensors(build_model(CASES[name])), dtype="float32")
    )
    return weights


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "qwen3_next", "gemma2", "gpt2"])
def test_models_compute_with_a_form_that_they_do_not_know(name: str) -> None:
    model, weights = build_model(CASES[name]), plain_weights(name)
    tokens = prompt(9, model.vocab_size)
    halves = map_weights(TwoHalves.of, weights)
    assert {type(weight) for weight in weights_of(halves)} == {TwoHalves}
    assert relative_error(whole_logits(model, halves, tokens), whole_logits(model, weights, tokens)) < 1e-3


def forms() -> dict[str, Weight]:
    values = np.random.default_rng(0).standard_normal((4, 6, 64), dtype=np.float32)
    plain = PlainWeight(jnp.asarray(values))
    part = PlainWeight(jnp.asarray(values[:2].reshape(12, 64)))
    return {
        "plain": plain,
        "native": NativeWeight(plain.values),
        "grouped": group(values),
        "halves": TwoHalves.of(plain),
        "parts": Parts((part, part), jnp.arange(24), (4, 6, 64)),
        **({"packed": pack(values, 1)} if library.load() else {}),
    }


@pytest.mark.parametrize("name", forms())
def test_every_form_says_what_it_is_and_keeps_it_wherever_its_arrays_go(name: str) -> None:
    weight = forms()[name]
    assert (weight.shape, weight.outputs, weight.inputs) == ((4, 6, 64), (4, 6), 64)
    like: Any = weight.map(lambda array, axes: jax.ShapeDtypeStruct(array.shape, array.dtype), ("mlp", None, "embed"))
    assert jax.tree.structure(like) == jax.tree.structure(weight)
    assert (like.shape, like.outputs, like.inputs) == ((4, 6, 64), (4, 6), 64)


@pytest.mark.parametrize("name", forms())
def test_products_of_the_first_rows_are_those_of_all(name: str) -> None:
    weight = forms()[name]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((7, 64), dtype=np.float32))
    whole, first = weight.product(x), for_rows([weight], jnp.int32(3))[0].product(x)
    assert whole.shape == (7, 24)
    np.testing.assert_array_equal(first[:3], whole[:3])
