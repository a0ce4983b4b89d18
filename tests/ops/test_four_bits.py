"""Four-bit codes in the order in which one GPU reads them stand for the same numbers."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.gpu.four_bit_product import GPUFourBits, four_bit_product
from quire.ops.kernels import gpu_form
from quire.ops.weights.activation_rounding import Rounding
from quire.ops.weights.coded import Coded
from quire.ops.weights.four_bits import FourBits
from quire.ops.weights.parts import Parts
from tests.gpu.test_four_bit_product import coded, turned
from tests.gpu.test_four_bit_product import rows_of as some_rows

compiled_rows, coded_rows = jax.jit(FourBits.rows), jax.jit(Coded.rows)
compiled_product, coded_product = jax.jit(FourBits.product), jax.jit(Coded.product)


@pytest.mark.parametrize("scales", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512])
def test_the_numbers_stay_the_same(group: int, has_zeros: bool, scales: str) -> None:
    weight = coded(24, 512, group, has_zeros=has_zeros, scales=scales)
    found = jax.jit(turned)(weight)
    for chosen in (np.arange(24), np.asarray([3, 0, 23])):
        np.testing.assert_array_equal(compiled_rows(found, chosen), coded_rows(weight, chosen))
    x = some_rows(5, 512, "float32")
    np.testing.assert_allclose(compiled_product(found, x), coded_product(weight, x), rtol=1e-5, atol=1e-4)


def test_heads_are_inputs_one_after_the_other() -> None:
    weight = coded(16, 256, 64)
    heads = replace(weight, codes=weight.codes.reshape(2, 8, 4, 32), scales=weight.scales.reshape(2, 8, 4),
                    shape=(2, 8, 4, 64), num_contracted=2)  # fmt: skip
    found = turned(heads)
    assert found.shape == heads.shape
    np.testing.assert_array_equal(found.codes, turned(weight).codes)
    x = some_rows(3, 256, "float32")
    np.testing.assert_array_equal(found.product(x.reshape(3, 4, 64)), turned(weight).product(x))


@pytest.mark.parametrize(("rows", "group"), [(1, 128), (5, 32), (17, 256)])
def test_the_kernels_product_is_that_of_the_codes(rows: int, group: int) -> None:
    weight, x = coded(72, 512, group, has_zeros=True), some_rows(rows, 512)
    got = np.asarray(jax.jit(partial(four_bit_product, interpret=True))(x, turned(weight)))
    right = np.asarray(weight.product(x.astype(jnp.float32)))
    assert np.linalg.norm(got - right) <= 1e-5 * np.linalg.norm(right)


@pytest.mark.parametrize(("inputs", "group"), [(192, 48), (768, 96), (1280, 320), (768, 384), (448, 112)])
def test_groups_that_do_not_fit_steps_are_left_as_they_are(inputs: int, group: int) -> None:
    assert FourBits.of(coded(24, inputs, group)) is None


def test_shapes_are_known_before_the_arrays_are() -> None:
    weight = coded(24, 512, 128, has_zeros=True)
    like: Any = jax.eval_shape(lambda: weight)
    found = GPUFourBits.of(weight)
    assert found is not None
    assert gpu_form(like, is_alone=True) == jax.eval_shape(lambda: found)
    nothing = found.map(lambda array, axes: array, ("mlp", "embed"))
    assert jax.tree.structure(nothing) == jax.tree.structure(found)


def test_one_gpu_has_such_weights_where_they_can_be() -> None:
    weight = coded(64, 512, 128)
    others = {
        "order of activations": replace(weight, index=jnp.zeros(512, jnp.int32)),
        "rows rounded": replace(weight, rounding=Rounding(is_float=False)),
        "floats": replace(weight, scales=weight.scales.astype(jnp.uint8)),
        "scales of four bytes": replace(weight, scales=weight.scales.astype(jnp.float32)),
        "eight bits": replace(weight, bits=8),
        "experts": replace(weight, is_of_experts=True),
        "groups that are not whole": replace(weight, shape=(64, 448), codes=weight.codes[:, :224]),
    }
    for name, other in others.items():
        assert isinstance(gpu_form(other, is_alone=True), Coded), name
    assert isinstance(gpu_form(weight, is_alone=True), FourBits)
    assert isinstance(weight.direct(), Coded)
    parts = gpu_form(Parts((weight, others["eight bits"]), jnp.arange(128), (128, 512)), is_alone=True)
    assert [type(part) for part in parts.weights] == [GPUFourBits, Coded]
