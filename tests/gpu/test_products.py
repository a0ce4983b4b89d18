"""Products with codes of eight bits as a GPU makes them, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.models.formats.channel_weights import channel_weight
from quire.models.params import Param
from quire.ops.weights.coded import FEW_ROWS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [1, 8, FEW_ROWS, FEW_ROWS + 1, 256, 600])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_are_those_of_the_dequantised_numbers(kind: Any, rows: int, dtype: str) -> None:
    outputs, inputs = 640, 1024
    param = Param((outputs, inputs), ("mlp", "embed"), (), join=lambda tensors: tensors[0], num_contracted=1)
    chance = np.random.default_rng(0)
    weight = channel_weight(jnp.asarray(chance.normal(size=param.shape), dtype), param, kind).direct()
    x = jnp.asarray(chance.normal(size=(rows, inputs)) * np.exp(chance.uniform(-3, 3, (rows, 1))), dtype)
    got = np.asarray(jax.jit(lambda x, weight: weight.product(x, x.dtype))(x, weight), np.float64)
    near = np.asarray(x, np.float64)
    if rows > FEW_ROWS:
        codes, scales = weight.rounding.codes(x, None)
        near = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)
    right = near @ (np.asarray(weight.codes, np.float64) * np.asarray(weight.scales, np.float64)).T
    # Tensor cores sum e4m3 with fewer bits than float32 has.
    assert np.linalg.norm(got - right) <= (4e-3 if dtype == "bfloat16" else 2e-3) * np.linalg.norm(right)
    other = jnp.concatenate([x[:1], -3 * x[1:]])
    alike = jax.jit(lambda x, weight: weight.product(x, x.dtype))(other, weight)
    assert np.array_equal(np.asarray(alike, np.float64)[0], got[0])
