"""Four-bit experts in the order in which one GPU reads them stand for the same numbers."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gates import ClampedGate
from quire.ops.gpu.expert_product import expert_product
from quire.ops.kernels import gpu_form
from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bit_experts import FourBitExperts
from tests.gpu.test_expert_product import choices, coded_weight, numbers, plain_codes

compiled_product = jax.jit(lambda x, weight, sizes: weight.grouped_product(x, sizes))


def turned(weight: Coded) -> FourBitExperts:
    found = FourBitExperts.of(weight)
    assert found is not None
    return found


@pytest.mark.parametrize("inputs", [32, 96, 128, 160, 256])
@pytest.mark.parametrize("outputs", [(24,), (1, 2, 24)])
def test_the_numbers_stay_the_same(outputs: tuple[int, ...], inputs: int) -> None:
    weight = coded_weight("mxfp4", (3, *outputs, inputs))
    found = jax.jit(turned)(weight)
    assert found.shape == weight.shape
    back = jax.jit(FourBitExperts.coded)(found)
    np.testing.assert_array_equal(back.codes, weight.codes)
    np.testing.assert_array_equal(back.scales, weight.scales)
    x, sizes = numbers((7, inputs), "float32", 1), jnp.asarray([2, 0, 5])
    right = replace(weight, is_direct=True)
    np.testing.assert_array_equal(compiled_product(x, found, sizes), compiled_product(x, right, sizes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_the_kernels_product_is_that_of_the_codes(tokens: int, dtype: str) -> None:
    weight, expert = coded_weight("mxfp4", (4, 40, 160)), choices(tokens, 4, 2)
    x = numbers((tokens, 1, 160), dtype, 1)
    product: Any = jax.jit(partial(expert_product, interpret=True))
    right = plain_codes(x.astype("float32"), expert, weight)
    np.testing.assert_allclose(product(x, jnp.asarray(expert), turned(weight)), right, rtol=1e-4, atol=1e-4)


def test_rows_of_four_bytes_are_left_to_the_plain_product() -> None:
    weight, expert = turned(coded_weight("mxfp4", (4, 40, 96))), jnp.asarray(choices(3, 4, 2))
    assert expert_product(numbers((3, 1, 96), "float32", 1), expert, weight, interpret=True) is None
    assert expert_product(numbers((3, 1, 96), "bfloat16", 1), expert, weight, gate=_other, interpret=True) is None
    both = turned(coded_weight("mxfp4", (4, 1, 2, 24, 96)))
    gate = ClampedGate(1.702, 7.0)
    found = expert_product(numbers((3, 1, 96), "bfloat16", 1), expert, both, None, gate, interpret=True)
    assert found is not None
    assert found.shape == (3, 2, 24)


def _other(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate + up


def test_one_gpu_has_such_experts_where_they_can_be() -> None:
    weight = coded_weight("mxfp4", (3, 24, 96))
    like: Any = jax.eval_shape(lambda: weight)
    found: Any = gpu_form(weight, is_alone=True)
    assert isinstance(found, FourBitExperts)
    assert gpu_form(like, is_alone=True) == jax.eval_shape(lambda: found)
    nothing = found.map(lambda array, axes: array, ("experts", "embed", "mlp"))
    assert jax.tree.structure(nothing) == jax.tree.structure(found)
    others = {
        "several GPUs": weight.direct(),
        "one matrix": gpu_form(replace(weight, is_of_experts=False), is_alone=True),
        "eight bits": gpu_form(coded_weight("int8", (3, 24, 96)), is_alone=True),
        "an order of inputs": gpu_form(replace(weight, index=jnp.zeros((3, 96), jnp.int32)), is_alone=True),
    }
    for name, other in others.items():
        assert isinstance(other, Coded), name
